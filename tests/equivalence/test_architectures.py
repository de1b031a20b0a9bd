"""Every supported architecture, packed and cut into stages, computes what transformers does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlora_worker.model.architecture import SUPPORTED_TYPES
from mlora_worker.model.attention import PackedRows
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
