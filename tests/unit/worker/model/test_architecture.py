"""Which models are supported, and which are refused. That each is computed as transformers does: tests/equivalence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlora_worker.model.architecture import read_architecture, read_config
from mlora_worker.model.errors import UnsupportedModel


def test_the_shape_is_read_from_the_configuration_alone(small_model: Any) -> None:
    architecture = read_architecture(small_model("llama").folder)
    assert (architecture.layers, architecture.hidden_size, architecture.max_positions) == (3, 32, 64)
    assert len(architecture.linears) == 21
    assert architecture.linears[1].path == "model.layers.0.self_attn.k_proj"
    assert architecture.linears[1].name == "k_proj"
    assert architecture.layer_costs() == [32 * 32 * 2 + 32 * 16 * 2 + 32 * 48 * 3] * 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "gemma"}, "model type gemma is not supported; supported are arcee, llama"),
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "rope type dynamic",
        ),
    ],
)
def test_what_would_be_computed_wrong_is_refused(small_model: Any, change: dict[str, Any], told: str) -> None:
    folder = small_model("llama").folder
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedModel, match=told):
        read_config(folder)
