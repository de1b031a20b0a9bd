"""Products by oneDNN keep every promise: neighbours, stages, PEFT."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from mlora_worker.frozen.onednn import OneDnnWeight, available
from mlora_worker.protocol import LoRAConfig, Schedule, Training
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import Base, Row, Task, Trained, assert_same, train

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if available(dtype)]
pytestmark = pytest.mark.skipif(not DTYPES, reason="this build of torch has no oneDNN")
STEPS = 12
ALL = ("all-linear",)
by_onednn = partial(train, freeze=OneDnnWeight, freeze_head=OneDnnWeight)
TRAINING = Training(
    batch_size=4, learning_rate=2e-3, schedule=Schedule.COSINE, warmup_steps=3, max_grad_norm=0.5, seed=11
)


def subject(rows: Callable[..., list[Row]]) -> Task:
    lora = LoRAConfig(rank=8, alpha=16, dropout=0.1, target_modules=ALL)
    return Task("subject", lora, TRAINING, rows(22, 1), STEPS)


def neighbours(rows: Callable[..., list[Row]]) -> list[Task]:
    wide = LoRAConfig(rank=20, alpha=8, dropout=0.3, target_modules=ALL)
    narrow = LoRAConfig(rank=1, alpha=4, target_modules=("down_proj",))
    one = Training(batch_size=1, learning_rate=1e-3, seed=4)
    return [
        Task("narrow", narrow, one, rows(5, 3, 2, 4), STEPS - 2),
        Task("wide", wide, TRAINING, rows(10, 2, 20, 60), STEPS - 5),
    ]


def same_bits(found: Trained, wanted: Trained) -> bool:
    return found.losses == wanted.losses and all(
        torch.equal(found.adapter[name], wanted.adapter[name]) for name in wanted.adapter
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_task_beside_neighbours_has_the_bits_of_itself_alone(
    base: Base, rows: Callable[..., list[Row]], dtype: torch.dtype
) -> None:
    """Their rows are multiplied together. Steps are cut in the same way: each fits into a microbatch."""
    alone = by_onednn(base, 1, [subject(rows)], dtype=dtype)["subject"]
    first, last = neighbours(rows)
    together = by_onednn(base, 1, [first, subject(rows), last], dtype=dtype)["subject"]
    assert set(alone.microbatches) == set(together.microbatches) == {1}
    assert same_bits(together, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_stages_changes_no_bit(
    base: Base, rows: Callable[..., list[Row]], dtype: torch.dtype
) -> None:
    """Steps of one row are cut nowhere."""
    lora = LoRAConfig(rank=8, alpha=16, dropout=0.1, target_modules=ALL)
    task = Task("one-row", lora, TRAINING.model_copy(update={"batch_size": 1}), rows(9, 1), STEPS)
    one, two = (by_onednn(base, stages, [task], dtype=dtype)["one-row"] for stages in (1, 2))
    assert set(one.microbatches) == set(two.microbatches) == {1}
    assert same_bits(two, one)


def test_it_equals_pefts_training(base: Base, rows: Callable[..., list[Row]]) -> None:
    task = Task("t", LoRAConfig(rank=8, alpha=16, target_modules=ALL), TRAINING, rows(22, 1), STEPS)
    ours = by_onednn(base, 1, [task])["t"]
    theirs = train_with_peft(base, task, ours.start)
    assert_same(ours, theirs, losses=1e-4, weights=1e-4)
