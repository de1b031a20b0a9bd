"""Ten steps of every kind of model equal PEFT's, packed beside a neighbour, on one stage and on two.

PEFT's mini-batches are single rows: a window shorter than the padding leaves padded positions nothing to look at, and
transformers' eager attention makes NaN of them; and frequencies that are chosen by a batch's longest row are those of the
row, as here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlora_worker.protocol import LoRAConfig, Training
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import Base, Row, Task, assert_same, train
from tests.fixtures.model_options import FAMILY

STEPS, LAYERS = 10, 2
ALL = LoRAConfig(rank=3, alpha=6, target_modules=("all-linear",))
SINGLE_ROWS = Training(
    batch_size=1, gradient_accumulation_steps=2, learning_rate=5e-3, max_grad_norm=1.0, seed=3
)
# Of types that are built alike, one: gradients are compared for every type (test_gradients).
TYPES = (
    "cohere2", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3",
    "smollm3",
)  # fmt: skip


@pytest.mark.parametrize("model_type", TYPES)
def test_ten_steps_equal_peft_on_one_and_two_stages(
    small_model: Callable[..., Any], rows: Callable[..., list[Row]], model_type: str
) -> None:
    options = dict(FAMILY.get(model_type, {}))
    if "layer_types" in options:
        options["layer_types"] = options["layer_types"][:LAYERS]
    saved = small_model(model_type, num_hidden_layers=LAYERS, **options)
    base = Base(saved.folder, saved.model)
    task = Task("t", ALL, SINGLE_ROWS, rows(11, 1, longest=16, vocabulary=97), STEPS)
    neighbour = Task("n", ALL, SINGLE_ROWS, rows(4, 2, longest=20, vocabulary=97), 2)
    one, two = (train(base, stages, [task, neighbour])["t"] for stages in (1, 2))
    theirs = train_with_peft(base, task, one.start)
    for ours in (one, two):
        assert_same(ours, theirs, losses=1e-4, weights=1e-4)
