"""The LoRAPipeline to which all children belong. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlora_operator.api import API_VERSION
from mlora_operator.api.pipeline import KIND
from mlora_operator.manifests.names import ANNOTATION_PIPELINE, child_name, labels


@dataclass(frozen=True, slots=True)
class Owner:
    namespace: str
    name: str
    uid: str

    @property
    def child(self) -> str:
        """Name of the StatefulSet and of the Service."""
        return child_name(self.name)

    @property
    def token_secret(self) -> str:
        return f"{self.child}-token"

    @property
    def tls_secret(self) -> str:
        return f"{self.child}-tls"


def metadata(owner: Owner, name: str) -> dict[str, Any]:
    """Of a child. The owner reference makes the garbage collector delete it: no finalizer is needed."""
    return {
        "namespace": owner.namespace,
        "name": name,
        "labels": labels(owner.name),
        "annotations": {ANNOTATION_PIPELINE: owner.name},
        "ownerReferences": [owner_reference(owner)],
    }


def owner_reference(owner: Owner) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
