"""When an evaluation is due, how it is cut, what follows from its result; and the file of losses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from mlora_worker.coordinator.task.evaluation import EvaluationRows, after
from mlora_worker.coordinator.task.history import History
from mlora_worker.data.training_rows.token_rows import MemoryWriter, TokenRow, TokenRows, labels_of
from mlora_worker.protocol import EarlyStopping, Evaluation, EvaluationRecord, StepRecord
from mlora_worker.storage.artifacts.task_state import EvaluationProgress


def row(tokens: int, supervised: int) -> TokenRow:
    labels = np.full(tokens, -100, np.int32)
    labels[:supervised] = 1
    return TokenRow(np.zeros(tokens, np.int32), labels)


def record(step: int, loss: float) -> EvaluationRecord:
    return EvaluationRecord(step=step, loss=loss, token_accuracy=0.5, tokens=10)


@pytest.mark.parametrize(
    ("step", "last", "due"),
    [
        (0, None, False),
        (3, None, False),
        (4, None, True),
        (4, 4, False),
        (8, 4, True),
        (10, 8, True),
        (10, 10, False),
    ],
)
def test_it_is_due_after_each_so_many_steps_and_after_the_last_one_and_once(
    step: int, last: int | None, due: bool
) -> None:
    rows = EvaluationRows(Evaluation(every_steps=4), [row(3, 1)])
    assert rows.is_due(step, 10, record(last, 1.0) if last is not None else None) is due


def test_rows_are_packed_under_the_budget_in_their_order_and_a_longer_one_travels_alone() -> None:
    rows = EvaluationRows(Evaluation(), [row(n, n // 2) for n in (4, 4, 9, 2, 2)])
    made = rows.begin(5, budget=8)
    assert list(reversed(made.left)) == [(0, 1), (2,), (3, 4)]
    assert made.supervised == 2 + 2 + 4 + 1 + 1


def test_each_evaluation_has_all_rows_and_they_are_cut_anew_for_another_budget() -> None:
    rows = EvaluationRows(Evaluation(), [row(4, 2)] * 4)
    first = rows.begin(5, budget=8)
    first.left.clear()
    assert list(reversed(rows.begin(10, budget=8).left)) == [(0, 1), (2, 3)]
    assert list(reversed(rows.begin(15, budget=4).left)) == [(0,), (1,), (2,), (3,)]


class Unseen(TokenRows):
    """Rows that nobody may look at."""

    def __getitem__(self, place: Any) -> Any:
        pytest.fail(f"looked at {place}")


@pytest.mark.parametrize("chosen", [None, [3, 0, 1]])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5, 4.0]])
def test_no_row_is_looked_at_to_begin_and_what_is_found_is_the_same(
    weights: list[float] | None, chosen: list[int] | None
) -> None:
    writer = MemoryWriter()
    for number, tokens in enumerate((4, 7, 5, 9)):
        ids, learnt = np.arange(tokens, dtype=np.int32), np.arange(tokens) > number
        weight = weights[number] if weights is not None else 1.0
        writer.add(ids, learnt, labels_of(ids, learnt), int(learnt[1:].sum()), weight)
    rows = writer.finish()
    if chosen is not None:
        rows = rows.chosen(np.array(chosen))
    looked = EvaluationRows(Evaluation(), list(rows)).begin(5, budget=12)
    rows.__class__ = Unseen
    assert EvaluationRows(Evaluation(), rows).begin(5, budget=12) == looked


def test_the_loss_is_the_mean_over_all_supervised_tokens_however_it_was_cut() -> None:
    made = EvaluationRows(Evaluation(), [row(4, 2), row(4, 3)]).begin(5, budget=4)
    for scores in ((4.0, 1.0), (6.0, 3.0)):
        made.left.pop()
        made.outstanding += 1
        assert not made.complete
        made.add(torch.tensor(scores, dtype=torch.float64))
    assert made.complete
    assert made.record() == EvaluationRecord(step=5, loss=2.0, token_accuracy=0.8, tokens=5)


@pytest.mark.parametrize(
    ("losses", "patience", "delta", "best", "stops_at"),
    [
        ([3, 2, 1], 1, 0.0, 3, None),
        ([3, 4, 2], 2, 0.0, 3, None),
        ([3, 4, 5], 2, 0.0, 1, 3),
        ([3, 3], 1, 0.0, 1, 2),
        ([3, 2.95, 2.9], 2, 0.1, 3, 3),
        ([3, 2.95, 2.85], 2, 0.1, 3, None),
        ([3, 4, 5], None, 0.0, 1, None),
    ],
)
def test_it_stops_after_so_many_evaluations_that_did_not_improve_enough(
    losses: list[float], patience: int | None, delta: float, best: int, stops_at: int | None
) -> None:
    stopping = EarlyStopping(patience=patience, min_delta=delta) if patience else None
    progress, stopped_at = EvaluationProgress(), None
    for number, loss in enumerate(losses, start=1):
        progress = after(progress, record(number, loss), Evaluation(early_stopping=stopping))
        if progress.stopped and stopped_at is None:
            stopped_at = number
    assert progress.best is not None
    assert (progress.best.step, stopped_at) == (best, stops_at)


def step(number: int) -> StepRecord:
    return StepRecord(step=number, loss=1.0, learning_rate=1e-4, grad_norm=None, tokens=7)


def test_losses_are_lines_in_the_order_of_the_steps_and_can_be_cut_and_taken_up() -> None:
    history = History()
    for number in (1, 2, 3):
        history.add_step(step(number))
        history.add_evaluation(record(number, float(number)))
    lines = [json.loads(line) for line in history.lines().splitlines()]
    assert [(line["step"], "loss" in line) for line in lines] == [
        (n, first) for n in (1, 2, 3) for first in (True, False)
    ]
    assert "gradNorm" not in lines[0]
    again = History(history.lines(2))
    again.add_step(step(3))
    again.add_evaluation(record(3, 3.0))
    assert again.lines() == history.lines()


def test_of_very_many_steps_each_second_or_fourth_has_a_line_also_after_a_resume() -> None:
    whole, resumed = History(most=10), History(most=10)
    for number in range(1, 101):
        whole.add_step(step(number))
        resumed.add_step(step(number))
        if number == 33:
            resumed = History(resumed.lines(), most=10)
    steps = [json.loads(line)["step"] for line in whole.lines().splitlines()]
    assert steps == [1, *range(16, 101, 16)]
    assert [json.loads(line)["step"] for line in resumed.lines().splitlines()][-3:] == steps[-3:]
