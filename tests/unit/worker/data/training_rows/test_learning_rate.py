from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    TrainingArguments,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from mlora_worker.data.training_rows.learning_rate import learning_rate
from mlora_worker.protocol import Schedule, Training

THEIRS = {
    Schedule.CONSTANT: lambda optimizer, warmup, _: get_constant_schedule_with_warmup(optimizer, warmup),
    Schedule.LINEAR: get_linear_schedule_with_warmup,
    Schedule.COSINE: get_cosine_schedule_with_warmup,
}


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize(
    ("total", "warmup"), [(1, 0), (1, 1), (10, 0), (10, 3), (10, 10), (7, 20), (200, 17)]
)
def test_each_step_uses_the_rate_of_transformers(schedule: Schedule, total: int, warmup: int) -> None:
    training = Training(learning_rate=3e-4, schedule=schedule, warmup_steps=warmup)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=training.learning_rate)
    scheduler = THEIRS[schedule](optimizer, warmup, total)
    for step in range(1, total + 1):
        assert learning_rate(step, total, training) == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-18
        )
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("ratio", [0.0, 0.03, 0.1, 1 / 3, 1.0])
@pytest.mark.parametrize("total", [2, 10, 33, 1000])
def test_a_fraction_of_the_steps_is_as_many_as_transformers_takes(total: int, ratio: float) -> None:
    training = Training(learning_rate=3e-4, schedule=Schedule.LINEAR, warmup_ratio=ratio)
    steps = theirs_of(total, ratio)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=training.learning_rate)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps, total)
    for step in range(1, total + 1):
        assert learning_rate(step, total, training) == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-18
        )
        optimizer.step()
        scheduler.step()


def theirs_of(total: int, ratio: float) -> int:
    """By transformers' own rule; it reads a number from 1 on as one of steps."""
    asked = SimpleNamespace(warmup_steps=ratio if ratio < 1 else total, warmup_ratio=ratio)
    return int(TrainingArguments.get_warmup_steps(asked, total))


@given(
    schedule=st.sampled_from(Schedule),
    total=st.integers(1, 10_000),
    warmup=st.integers(0, 12_000),
    data=st.data(),
)
def test_a_rate_is_never_negative_nor_above_the_peak(
    schedule: Schedule, total: int, warmup: int, data: st.DataObject
) -> None:
    training = Training(learning_rate=0.5, schedule=schedule, warmup_steps=warmup)
    assert 0.0 <= learning_rate(data.draw(st.integers(1, total)), total, training) <= 0.5
