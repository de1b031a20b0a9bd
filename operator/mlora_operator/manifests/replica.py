"""The LoRAPipelines that share the tasks of one: its replicas. Pure."""

from __future__ import annotations

from typing import Any

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.manifests.names import REPLICA_HASH, REPLICA_NUMBER, REPLICA_OF, digest, replica_name
from mlora_operator.manifests.owner import Owner, owner_reference
from mlora_operator.manifests.pipeline import made_pipeline


def replica_hash(spec: LoRAPipelineSpec) -> str:
    """Changes with what a replica is made of, so that a changed pipeline has changed replicas."""
    return digest(_spec(spec))


def replica_manifest(owner: Owner, spec: LoRAPipelineSpec, number: int) -> dict[str, Any]:
    """Replica ``number`` of the pipeline ``owner`` with this ``spec``. It goes when its owner goes."""
    return made_pipeline(
        owner.namespace,
        replica_name(owner.name, number),
        {REPLICA_OF: owner.name, REPLICA_NUMBER: str(number), REPLICA_HASH: replica_hash(spec)},
        _spec(spec),
        ownerReferences=[owner_reference(owner)],
    )


def _spec(spec: LoRAPipelineSpec) -> dict[str, Any]:
    """What the user wrote, without the replicas: a replica has none."""
    return spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"replicas"})
