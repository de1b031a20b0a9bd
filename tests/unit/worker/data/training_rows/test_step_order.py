from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.data.training_rows.step_order import StepPlan, permutation
from mlora_worker.protocol import Training

ORDER_OF_SEED_42 = [[7, 1, 6, 4, 3, 5, 9, 0, 2, 8], [4, 9, 5, 3, 0, 2, 7, 1, 6, 8]]


def plan(rows: int, **training: int) -> StepPlan:
    return StepPlan(rows, Training(**training))


@given(
    rows=st.integers(1, 60),
    batch=st.integers(1, 8),
    accumulation=st.integers(1, 4),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**31 - 1),
)
def test_every_epoch_takes_every_row_once(
    rows: int, batch: int, accumulation: int, epochs: int, seed: int
) -> None:
    steps = plan(rows, batch_size=batch, gradient_accumulation_steps=accumulation, epochs=epochs, seed=seed)
    per_epoch = -(-rows // (batch * accumulation))
    assert steps.total_steps == epochs * per_epoch
    for epoch in range(epochs):
        windows = [steps.rows_of_step(epoch * per_epoch + step) for step in range(1, per_epoch + 1)]
        assert sorted(row for window in windows for row in window) == list(range(rows))
        assert {len(window) for window in windows[:-1]} <= {batch * accumulation}


@given(rows=st.integers(1, 60), seed=st.integers(0, 2**31 - 1), data=st.data())
def test_a_step_has_the_same_rows_whatever_was_asked_before(
    rows: int, seed: int, data: st.DataObject
) -> None:
    steps = plan(rows, batch_size=4, epochs=3, seed=seed)
    asked = data.draw(st.lists(st.integers(1, steps.total_steps), max_size=10))
    for step in asked:
        assert steps.rows_of_step(step) == plan(rows, batch_size=4, epochs=3, seed=seed).rows_of_step(step)


def test_the_order_is_this_one_on_every_machine_and_under_every_numpy() -> None:
    assert permutation(10, seed=42, epoch=0).tolist() == ORDER_OF_SEED_42[0]
    assert permutation(10, seed=42, epoch=1).tolist() == ORDER_OF_SEED_42[1]


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {tuple(permutation(50, seed, epoch)) for seed in (0, 1, 2**31 - 1) for epoch in (0, 1, 2)}
    assert len(orders) == 9


def test_max_steps_overrides_epochs_in_both_directions() -> None:
    assert plan(100, batch_size=10, epochs=1, max_steps=3).total_steps == 3
    longer = plan(100, batch_size=10, epochs=1, max_steps=25)
    assert longer.total_steps == 25
    assert len(longer.rows_of_step(25)) == 10


@pytest.mark.parametrize("step", [0, -1, 11])
def test_a_step_outside_the_plan_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=r"not in 1\.\.10"):
        plan(100, batch_size=10).rows_of_step(step)


def test_no_rows_make_no_plan() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        plan(0)
