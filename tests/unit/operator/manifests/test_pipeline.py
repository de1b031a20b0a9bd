"""The LoRAPipeline that is made for a model of the catalogue."""

from __future__ import annotations

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.manifests.pipeline import catalogue_hash, pipeline_manifest
from mlora_operator.settings import CatalogueModel

MODEL = CatalogueModel.model_validate(
    {
        "name": "Org/Toy-1B",
        "uri": "s3://models/toy",
        "dtype": "float32",
        "stages": 2,
        "idleTimeout": "5m",
        "storage": {"endpoint": "http://s3:8333", "secretRef": {"name": "model-store"}},
        "worker": {"resources": {"limits": {"cpu": "1"}}},
    }
)


def test_it_serves_all_namespaces_with_the_entrys_fields() -> None:
    found = pipeline_manifest(MODEL, "mlora-system")
    assert found["metadata"]["namespace"] == "mlora-system"
    assert found["metadata"]["annotations"] == {"mlora.dev/catalogue-hash": catalogue_hash(MODEL)}
    assert found["spec"] == {
        "model": {"name": "Org/Toy-1B", "uri": "s3://models/toy", "dtype": "float32"},
        "allowedNamespaces": {"from": "All"},
        "stages": 2,
        "idleTimeout": "5m",
        "storage": {"endpoint": "http://s3:8333", "secretRef": {"name": "model-store"}},
        "worker": {"resources": {"limits": {"cpu": "1"}}},
    }
    assert LoRAPipelineSpec.model_validate(found["spec"]).stages == 2


def test_a_changed_entry_has_another_hash() -> None:
    assert catalogue_hash(MODEL) != catalogue_hash(MODEL.model_copy(update={"stages": 3}))
