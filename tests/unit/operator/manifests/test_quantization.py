"""A quantised base is another base, and workers of former versions can read what concerns a plain one."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.manifests.owner import Owner
from mlora_operator.manifests.pipeline import pipeline_manifest
from mlora_operator.manifests.statefulset import lineage
from mlora_operator.manifests.worker import worker_config
from mlora_operator.settings import CatalogueModel
from mlora_worker.protocol import Quantization

OWNER = Owner(namespace="team-a", name="m", uid="u-1")


def spec(**quantization: Any) -> LoRAPipelineSpec:
    model = {"name": "m", "uri": "s3://models/m", "quantization": quantization}
    return LoRAPipelineSpec.model_validate({"model": model})


def test_workers_are_told_and_a_plain_base_is_not_mentioned() -> None:
    asked = worker_config(OWNER, spec(type="nf4", doubleQuantization=False), "text", allow_file_uris=False)
    assert asked.model.quantization == Quantization(type="nf4", double_quantization=False)
    plain = worker_config(OWNER, spec(type="none"), "text", allow_file_uris=False)
    assert "quantization" not in plain.to_json()


def test_each_quantisation_is_a_lineage_of_its_own_and_none_is_that_of_before() -> None:
    kinds = [
        {"type": "nf4"},
        {"type": "nf4", "doubleQuantization": False},
        {"type": "int8"},
        {"type": "none"},
    ]
    found = [lineage(spec(**kind)) for kind in kinds]
    assert len(set(found)) == len(kinds)
    assert found[-1] == lineage(
        LoRAPipelineSpec.model_validate({"model": {"name": "m", "uri": "s3://models/m"}})
    )
    same = [lineage(spec(type="int8", doubleQuantization=double)) for double in (True, False)]
    assert len(set(same)) == 1, "it says something of nf4 alone"


@pytest.mark.parametrize("type", ["nf4", "int8"])
def test_a_model_of_the_catalogue_may_be_quantised(type: str) -> None:
    entry = CatalogueModel.model_validate(
        {"name": "m", "uri": "s3://models/m", "quantization": {"type": type}}
    )
    made = pipeline_manifest(entry, "mlora-system")
    assert LoRAPipelineSpec.model_validate(made["spec"]).model.quantization.type == type
