"""The LoRAPipeline that the operator makes for a base model of its catalogue. Pure."""

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
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "namespace": namespace,
            "name": catalogue_name(model.name),
            "labels": {LABEL_PART_OF: PART_OF, LABEL_MANAGED_BY: FIELD_MANAGER},
            "annotations": {CATALOGUE_HASH: catalogue_hash(model)},
        },
        "spec": _spec(model),
    }


def _spec(model: CatalogueModel) -> dict[str, Any]:
    return model.pipeline_spec().model_dump(mode="json", by_alias=True, exclude_unset=True)
