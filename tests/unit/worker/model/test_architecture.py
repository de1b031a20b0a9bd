"""Which models are supported, and that each is computed as transformers does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from mlora_worker.model.architecture import SUPPORTED_TYPES, read_architecture, read_config
from mlora_worker.model.attention import PackedRows
from mlora_worker.model.errors import UnsupportedModel
from mlora_worker.model.load import load_stage

CPU = torch.device("cpu")
# Options under which a type differs from Llama in what packing could break.
OPTIONS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5},
    "ministral": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "smollm3": {"no_rope_layer_interval": 2},
    "starcoder2": {"sliding_window": 5},
}


@pytest.mark.parametrize("model_type", SUPPORTED_TYPES)
def test_packed_rows_through_three_stages_equal_transformers_row_by_row(
    small_model: Any, model_type: str
) -> None:
    saved = small_model(model_type, num_hidden_layers=4, **OPTIONS.get(model_type, {}))
    lengths = (7, 1, 13, 2)
    ids = torch.randint(3, 97, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    rows = PackedRows(lengths, CPU)
    stages = [load_stage(saved.folder, saved, i, 3, torch.float32, CPU) for i in range(3)]
    hidden = stages[0].embed(ids)
    for stage in stages:
        hidden = stage.run_layers(hidden, rows)
    logits = stages[-1].norm(hidden) @ stages[-1].head_weight.T
    for row, found in zip(ids.split(lengths), logits.split(lengths), strict=True):
        wanted = saved.model(input_ids=row[None]).logits[0]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


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
