"""Rows of all tasks in one product of torch's keep every promise, and change no bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from mlora_worker.frozen.joining import JoiningWeight, joining
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.protocol import LoRAConfig
from tests.equivalence.tasks import Base, Row, Task, train
from tests.equivalence.test_onednn import ALL, STEPS, TRAINING, neighbours, same_bits, subject

joined = partial(train, freeze=JoiningWeight)


@pytest.fixture(autouse=True)
def where_it_is_shown(base: Base) -> None:
    linears = (one for one in base.model.model.layers.modules() if isinstance(one, nn.Linear))
    shapes = {(one.out_features, one.in_features) for one in linears}
    if joining(shapes, torch.float32) != shapes:
        pytest.skip("not so on this processor with so many threads")


def test_a_task_beside_neighbours_has_the_bits_of_itself_alone(
    base: Base, rows: Callable[..., list[Row]]
) -> None:
    alone = joined(base, 1, [subject(rows)])["subject"]
    first, last = neighbours(rows)
    together = joined(base, 1, [first, subject(rows), last])["subject"]
    assert set(alone.microbatches) == set(together.microbatches) == {1}
    assert same_bits(together, alone)


def test_a_microbatch_of_few_tokens_has_the_bits_that_it_has_beside_others(
    base: Base, rows: Callable[..., list[Row]]
) -> None:
    lora = LoRAConfig(rank=8, alpha=16, target_modules=ALL)
    short = Task("short", lora, TRAINING.model_copy(update={"batch_size": 1}), rows(9, 1, 3, 9), STEPS)
    alone = joined(base, 1, [short])["short"]
    together = joined(base, 1, [short, *neighbours(rows)])["short"]
    assert same_bits(together, alone)


def test_rows_by_themselves_have_the_same_bits(base: Base, rows: Callable[..., list[Row]]) -> None:
    """So it does not matter to a resumed task which way its worker takes."""
    lora = LoRAConfig(rank=8, alpha=16, dropout=0.1, target_modules=ALL)
    tasks = [Task(f"task-{n}", lora, TRAINING, rows(12, n, 20, 60), STEPS) for n in range(2)]
    found, wanted = joined(base, 1, tasks), train(base, 1, tasks, freeze=PlainWeight)
    assert all(same_bits(found[name], wanted[name]) for name in wanted)
