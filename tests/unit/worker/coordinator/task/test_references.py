"""Which rows a reference is asked about, and when."""

from __future__ import annotations

from mlora_worker.coordinator.task.references import AHEAD, References, ReferenceTable
from mlora_worker.data.training_rows.step_order import StepPlan
from mlora_worker.protocol import Training


def references(pairs: int, *, batch: int = 2, epochs: int = 2, whole: bool = False) -> References:
    steps = StepPlan(pairs, Training(batch_size=batch, epochs=epochs, seed=3))
    return References(ReferenceTable.of(pairs), steps, whole=whole)


def answer(found: References, pairs: list[int]) -> None:
    found.train.asked.update(pairs)
    found.train.learn(pairs, [float(number) for number in range(2 * len(pairs))])


def test_a_step_waits_for_its_own_rows_and_no_others() -> None:
    found = references(20)
    assert not found.ready(1)
    first = found.wanted(1)
    assert sorted(first) == sorted(found.steps.rows_of_step(1))
    answer(found, first)
    assert found.ready(1)
    assert not found.ready(2)


def test_rows_are_asked_for_a_few_steps_ahead() -> None:
    found = references(100)
    asked = []
    while pairs := found.wanted(1):
        found.train.asked.update(pairs)
        asked += pairs
    assert len(asked) == 2 * AHEAD


def test_rows_that_are_on_their_way_are_not_asked_for_twice_but_again_when_they_are_lost() -> None:
    found = references(4, epochs=1)
    pairs = found.wanted(1)
    found.train.asked.update(pairs)
    assert not set(found.wanted(1)) & set(pairs)
    found.train.asked.difference_update(pairs)
    found.restart()
    assert found.wanted(1) == pairs


def test_a_later_epoch_asks_for_nothing_that_is_known() -> None:
    found = references(6)
    for step in (1, 2, 3):
        answer(found, found.wanted(step))
    assert found.train.complete
    assert found.wanted(4) == []
    assert found.ready(4)


def test_a_task_that_resumes_later_asks_for_rows_as_the_first_epoch_had_them() -> None:
    found = references(10)
    asked = found.wanted(found.steps.steps_per_epoch + 1)
    first_epoch = [set(found.steps.rows_of_step(step)) for step in range(1, found.steps.steps_per_epoch + 1)]
    assert set(asked) in first_epoch


def test_an_adapter_that_is_the_reference_is_asked_about_all_rows_first() -> None:
    found = references(200, whole=True)
    while pairs := found.wanted(1):
        assert not found.ready(1)
        answer(found, pairs)
    assert found.train.complete
    assert found.ready(1)


def test_values_are_told_by_pair() -> None:
    table = ReferenceTable.of(3)
    table.learn([2, 0], [-1.0, -2.0, -3.0, -4.0])
    assert table.of_rows([0, 2]) == (-3.0, -4.0, -1.0, -2.0)
    assert not table.complete
