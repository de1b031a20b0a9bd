"""Forwards of mismatched rows come before each step, and again when they are lost; what they bring may be no number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mlora_worker.coordinator.task.divergence import MismatchedRows, begun
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.data.prepare import TokenRow
from mlora_worker.pipeline.faults import Fault, Phase
from mlora_worker.protocol import FailureReason, TaskPhase
from mlora_worker.stream.items import Evaluate, Item, Segment, Train
from tests.unit.worker.coordinator.dispatch.test_dispatcher import Play, come_back, fault, prepared_task

ROWS, STEPS = 4, 2  # two rows a step


def answer(prompt: int, tokens: int, first: int = 0) -> TokenRow:
    ids = np.arange(first, first + prompt + tokens, dtype=np.int32)
    labels = np.full(len(ids), -100, np.int32)
    labels[prompt - 1 : -1] = ids[prompt:]
    return TokenRow(ids, labels, desirable=bool(first % 20))


def kto(name: str = "t", **training: Any) -> TaskRun:
    rows = [answer(2, 3, 10 * number) for number in range(ROWS)]
    return prepared_task(name, rows=rows, objective={"type": "kto"}, **training)


def asked_of(items: list[Item]) -> list[Evaluate]:
    return [item for item in items if isinstance(item, Evaluate)]


def reply(play: Play, *items: Evaluate, adapter: float = -1.0, base: float = -2.0) -> None:
    for item in items:
        value = adapter if item.reference == "adapter" else base
        play.dispatcher.evaluated(item.number, torch.full((len(item.lengths),), value, dtype=torch.float64))


def to_first_estimate(play: Play) -> list[Evaluate]:
    """Past the forwards for the rows' own references."""
    while asked := asked_of(play.run()):
        if any(item.reference == "adapter" for item in asked):
            return asked
        reply(play, *asked)
    raise AssertionError("nothing was asked for")


def test_each_prompt_is_followed_by_the_answer_before_it() -> None:
    rows = MismatchedRows([answer(2, 3), answer(4, 1, 10), answer(3, 2, 20)], 512)
    assert [row.ids.tolist() for row in rows] == [
        [0, 1, 23, 24],
        [10, 11, 12, 13, 2, 3, 4],
        [20, 21, 22, 14],
    ]
    assert rows[0].labels.tolist() == [-100, 23, 24, -100]
    assert rows.lengths == [len(row.ids) for row in rows] == [4, 7, 4]
    assert [row.ids.tolist() for row in rows[1:]] == [rows[1].ids.tolist(), rows[2].ids.tolist()]


def test_what_is_too_long_is_cut_at_its_end() -> None:
    rows = MismatchedRows([answer(2, 3), answer(4, 1, 10)], 5)
    assert rows[1].ids.tolist() == [10, 11, 12, 13, 2]
    assert rows.lengths == [3, 5]


def test_an_estimate_is_a_mean_of_differences_and_never_below_zero() -> None:
    rows = MismatchedRows([answer(2, 3), answer(4, 1, 10)], 512)
    found = begun(rows, [(0,), (1,)])
    assert [side for side, _ in found.left[::-1]] == ["adapter", "adapter", "base", "base"]
    found.left, found.outstanding = [], 4
    for side, value in (("adapter", -1.0), ("adapter", -2.0), ("base", -4.0), ("base", -1.0)):
        found.add(side, torch.tensor([value], dtype=torch.float64))  # type: ignore[arg-type]
    assert (found.complete, found.kl) == (True, 1.0)
    found.sums["base"] = 0.0
    assert found.kl == 0.0
    found.sums["base"] = math.nan
    assert found.kl is None


def test_a_step_waits_for_its_estimate_and_its_segment_is_told() -> None:
    task = kto()
    play = Play(task)
    first = to_first_estimate(play)
    assert [item.reference for item in first] == ["adapter", "base"]
    assert not [item for item in play.announced if isinstance(item, Train)]
    reply(play, *first, adapter=-1.0, base=-1.5)
    second = asked_of(play.run())
    (train,) = [item for item in play.announced if isinstance(item, Train)]
    assert train.segments[0].unpaired is not None
    assert train.segments[0].unpaired.kl == 0.5
    assert train.segments[0].unpaired.desirable is not None
    # The first step's update rides with the first forward behind it, which is by the adapter.
    assert [(item.reference, item.update is not None) for item in second] == [
        ("adapter", True),
        ("base", False),
    ]
    reply(play, *second)
    play.run()
    assert task.phase is TaskPhase.SAVING


def test_an_estimate_that_met_a_fault_is_made_again() -> None:
    task = kto()
    play = Play(task)
    adapter, base = to_first_estimate(play)
    reply(play, adapter)
    play.dispatcher.faulted(Fault(stage=0, number=base.number, phase=Phase.FORWARD, error="OSError: no"))
    again = asked_of(play.run())
    assert [(item.reference, item.lengths) for item in again] == [
        ("adapter", adapter.lengths), ("base", base.lengths),
    ]  # fmt: skip
    reply(play, *again)
    reply(play, *asked_of(play.run()))
    play.run()
    assert (task.phase, task.failure) == (TaskPhase.SAVING, None)


def test_an_estimate_that_is_no_number_fails_the_task_and_nobody_else() -> None:
    task, neighbour = kto("a"), prepared_task("b")
    play = Play(task, neighbour)
    reply(play, *to_first_estimate(play), adapter=math.nan)
    assert task.failure is not None
    assert task.failure.reason is FailureReason.NON_FINITE_LOSS
    assert "the divergence from the reference is not a finite number" in task.failure.message
    play.run()
    assert neighbour.phase is TaskPhase.SAVING


def test_a_task_that_leaves_meanwhile_asks_again_when_it_is_back() -> None:
    task = kto()
    play = Play(task)
    former = to_first_estimate(play)
    task.plan = task.plan.model_copy(update={"admitted": False})
    play.run()
    assert not task.in_stream
    reply(play, *former)
    task.plan = task.plan.model_copy(update={"admitted": True})
    again = asked_of(play.run())
    assert [item.reference for item in again] == ["adapter", "base"]
    assert task.flight.divergence is not None
    assert not task.flight.divergence.complete


def to_shared_step(play: Play) -> Train:
    """Of a task that estimates and a neighbour that waits for nothing."""
    while True:
        entry = play.dispatcher.supply()
        assert entry is not None
        if isinstance(entry.item, Evaluate):
            reply(play, entry.item, adapter=-1.0, base=-1.5)
        elif isinstance(entry.item, Train):
            if len(entry.item.segments) == 2:
                return entry.item
            come_back(play, entry.item)


def next_train_of(play: Play, task: TaskRun) -> Segment:
    while entry := play.dispatcher.supply():
        if isinstance(entry.item, Evaluate):
            reply(play, entry.item)
        elif isinstance(entry.item, Train):
            come_back(play, entry.item)
            for segment in entry.item.segments:
                if segment.task == task.uid:
                    return segment
    raise AssertionError("it makes no further step")


def test_a_step_that_a_neighbours_fault_voided_is_repeated_with_the_same_estimate() -> None:
    task, neighbour = kto("a"), prepared_task("b", max_steps=50)
    play = Play(task, neighbour)
    void = to_shared_step(play)
    play.dispatcher.faulted(fault(void.number, Phase.UPDATE, neighbour.uid))
    come_back(play, void, faults=1)
    assert neighbour.failure is not None
    assert task.may_step
    again = next_train_of(play, task)
    assert again.unpaired is not None
    assert (again.step, again.unpaired.kl, again.discard) == (1, 0.5, True)
    while asked := asked_of(play.run()):
        reply(play, *asked)
    assert task.phase is TaskPhase.SAVING


def test_a_step_on_trial_is_repeated_with_the_same_estimate() -> None:
    task, neighbour = kto("a"), prepared_task("b", max_steps=50)
    play = Play(task, neighbour)
    void = to_shared_step(play)
    play.dispatcher.faulted(fault(void.number))
    come_back(play, void, faults=1)
    again = next_train_of(play, task)
    assert again.unpaired is not None
    assert (again.step, again.unpaired.kl, again.discard) == (1, 0.5, True)


@pytest.mark.parametrize("loss", ["apo_zero_unpaired"])
def test_a_loss_without_an_estimate_asks_for_none(loss: str) -> None:
    task = prepared_task(
        "t", rows=[answer(2, 3, 10 * n) for n in range(ROWS)], objective={"type": "kto", "lossType": loss}
    )
    play = Play(task)
    while asked := asked_of(play.run()):
        assert {item.reference for item in asked} == {"base"}
        reply(play, *asked)
    assert task.phase is TaskPhase.SAVING
