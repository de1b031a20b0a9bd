"""The LoRAPipelines that the operator makes, and those for base models of its catalogue. Pure."""

from __future__ import annotations

from typing import Any

from mlora_operator.api import API_VERSION
from mlora_operator.api.pipeline import KIND
from mlora_operator.manifests.names import (
    CATALOGUE_HASH,
    FIELD_MANAGER,
    LABEL_MANAGED_BY,
    LABEL_PART_OF,
    PART_OF,
    catalogue_name,
    digest,
)
from mlora_operator.settings import CatalogueModel


def catalogue_hash(model: CatalogueModel) -> str:
    """Changes when the catalogue's entry does, so that a corrected chart value reaches the pipeline."""
    return digest(_spec(model))


def pipeline_manifest(model: CatalogueModel, namespace: str) -> dict[str, Any]:
    """The LoRAPipeline in the operator's namespace that serves ``model`` to all."""
    annotations = {CATALOGUE_HASH: catalogue_hash(model)}
    return made_pipeline(namespace, catalogue_name(model.name), annotations, _spec(model))


def made_pipeline(
    namespace: str, name: str, annotations: dict[str, str], spec: dict[str, Any], **metadata: Any
) -> dict[str, Any]:
    """A LoRAPipeline that says whose making it is."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "namespace": namespace,
            "name": name,
            "labels": {LABEL_PART_OF: PART_OF, LABEL_MANAGED_BY: FIELD_MANAGER},
            "annotations": annotations,
            **metadata,
        },
        "spec": spec,
    }


def _spec(model: CatalogueModel) -> dict[str, Any]:
    return model.pipeline_spec().model_dump(mode="json", by_alias=True, exclude_unset=True)
