from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
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
