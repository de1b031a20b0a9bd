"""Every supported architecture, packed and cut into stages, computes what transformers does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlora_worker.model.architecture import SUPPORTED_TYPES
from mlora_worker.model.attention import PackedRows
from mlora_worker.model.load import load_stage
from tests.fixtures.model_options import FAMILY, VARIANTS
from tests.fixtures.small_models import Saved

CPU = torch.device("cpu")
LENGTHS = (
    7,
    1,
    13,
    2,
)  # windows of five tokens, and longer frequencies from nine on, matter to some rows alone


def packed_logits(saved: Saved, ids: Tensor, stages: int) -> Tensor:
    rows = PackedRows(LENGTHS, CPU)
    parts = [load_stage(saved.folder, saved, i, stages, torch.float32, CPU) for i in range(stages)]
    hidden = parts[0].embed(ids, rows)
    for part in parts:
        hidden = part.run_layers(hidden, rows)
    return parts[-1].logits(hidden)


def assert_equals_transformers(saved: Saved, stages: int) -> None:
    ids = torch.randint(3, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    found = packed_logits(saved, ids, stages)
    for row, own in zip(ids.split(LENGTHS), found.split(LENGTHS), strict=True):
        wanted = saved.model(input_ids=row[None]).logits[0]
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", SUPPORTED_TYPES)
def test_packed_rows_through_stages_equal_transformers_row_by_row(small_model: Any, model_type: str) -> None:
    saved = small_model(model_type, num_hidden_layers=4, **FAMILY.get(model_type, {}))
    for stages in (1, 2, 3):
        assert_equals_transformers(saved, stages)


@pytest.mark.parametrize("story", VARIANTS)
def test_variants_of_the_same_types_equal_transformers(small_model: Any, story: str) -> None:
    model_type, options = VARIANTS[story]
    assert_equals_transformers(small_model(model_type, num_hidden_layers=4, **options), 2)
