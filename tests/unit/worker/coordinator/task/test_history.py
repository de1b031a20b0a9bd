"""The losses beside an adapter: bounded, and the same after an interruption as without one."""

from __future__ import annotations

import json

import pytest

from mlora_worker.coordinator.task.history import History
from mlora_worker.protocol import EvaluationRecord, StepRecord


def step(number: int) -> StepRecord:
    return StepRecord(step=number, loss=1.5, learning_rate=1e-4, grad_norm=0.5, tokens=7)


def evaluation(number: int) -> EvaluationRecord:
    return EvaluationRecord(step=number, loss=1.25, token_accuracy=0.5, tokens=9)


def steps_of(history: History) -> list[int]:
    return [json.loads(line)["step"] for line in history.lines().splitlines()]


@pytest.mark.parametrize("interrupted_after", [1, 2, 3, 7, 20, 21, 22, 40, 41, 63])
def test_an_interruption_changes_no_line(interrupted_after: int) -> None:
    whole = History(most=20)
    first = History(most=20)
    for number in range(1, interrupted_after + 1):
        whole.add_step(step(number))
        first.add_step(step(number))
    second = History(first.lines(), most=20)
    for number in range(interrupted_after + 1, 101):
        whole.add_step(step(number))
        second.add_step(step(number))
    assert steps_of(second) == steps_of(whole)


def test_neither_steps_nor_evaluations_grow_without_bound() -> None:
    history = History(most=20)
    for number in range(1, 501):
        history.add_step(step(number))
        history.add_evaluation(evaluation(number))
    assert len(steps_of(history)) <= 40
    assert {1, 500 - 500 % 32} <= set(steps_of(history)), "from the first step to the last ones"


def test_what_is_no_history_is_an_error_of_its_reader() -> None:
    with pytest.raises((ValueError, KeyError)):
        History(b"no json\n")
