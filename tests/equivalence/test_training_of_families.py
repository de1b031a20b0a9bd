"""Ten steps of every kind of model equal PEFT's, packed beside a neighbour, on one stage and on two.

PEFT's mini-batches are single rows: a window shorter than the padding leaves padded positions nothing to look at, and
transformers' eager attention makes NaN of them; and frequencies that are chosen by a batch's longest row are those of the
row, as here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlora_worker.model.architecture import SUPPORTED_TYPES
from mlora_worker.protocol import LoRAConfig, Training
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import Base, Row, Task, assert_same, train
from tests.fixtures.model_options import FAMILY, TARGETS, TRAINED_VARIANTS

STEPS, LAYERS = 10, 2
ALL = LoRAConfig(rank=3, alpha=6, target_modules=("all-linear",))
# Adam's first update has the gradient's sign alone: an element of B whose gradient is nothing but rounding would get any
# sign. With a warm-up the first update's rate is zero, and the second knows two gradients.
SINGLE_ROWS = Training(
    batch_size=1, gradient_accumulation_steps=2, learning_rate=5e-3, warmup_steps=2, max_grad_norm=1.0, seed=3
)


@pytest.mark.parametrize("kind", [*SUPPORTED_TYPES, *TRAINED_VARIANTS])
def test_ten_steps_equal_peft_on_one_and_two_stages(
    small_model: Callable[..., Any], rows: Callable[..., list[Row]], kind: str
) -> None:
    model_type, options = TRAINED_VARIANTS.get(kind, (kind, FAMILY.get(kind, {})))
    saved = small_model(model_type, **({"num_hidden_layers": LAYERS} | options))
    base = Base(saved.folder, saved.model)
    lora = ALL.model_copy(update={"target_modules": TARGETS.get(kind, ALL.target_modules)})
    task = Task("t", lora, SINGLE_ROWS, rows(11, 1, longest=16, vocabulary=97), STEPS)
    at_once = SINGLE_ROWS.model_copy(update={"warmup_steps": 0})
    neighbour = Task("n", lora, at_once, rows(4, 2, longest=20, vocabulary=97), 4)
    one, two = (train(base, stages, [task, neighbour])["t"] for stages in (1, 2))
    theirs = train_with_peft(base, task, one.start)
    for ours in (one, two):
        assert_same(ours, theirs, losses=1e-4, weights=1e-4)
