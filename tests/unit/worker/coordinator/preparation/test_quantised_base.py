"""A checkpoint from a base of another quantisation is one of another task."""

from __future__ import annotations

import json

from mlora_worker.coordinator.preparation.fingerprint import fingerprint_of
from mlora_worker.protocol import LoRAConfig, ModelSource, Training
from mlora_worker.storage.artifacts.task_state import Fact
from tests.fixtures.toy_facts import toy_facts


def facts(quantization: dict[str, object] | None) -> dict[str, Fact]:
    said = {"name": "m", "uri": "s3://models/m"} | (
        {} if quantization is None else {"quantization": quantization}
    )
    source = ModelSource.model_validate(said)
    return fingerprint_of(LoRAConfig(), Training(max_steps=1), ("q_proj",), (), 1, source, toy_facts())


def test_each_quantisation_has_facts_of_its_own() -> None:
    kinds = [None, {"type": "nf4"}, {"type": "nf4", "doubleQuantization": False}, {"type": "int8"}]
    assert len({json.dumps(facts(kind), sort_keys=True) for kind in kinds}) == len(kinds)


def test_a_checkpoint_of_a_plain_base_is_known_as_before() -> None:
    assert facts({"type": "none"}) == facts(None)
    assert "model.quantization" not in facts(None)
