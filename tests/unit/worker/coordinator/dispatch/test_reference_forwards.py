"""Who shares what a reference thinks of rows, and what becomes of values that are no numbers or never come."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlora_worker.coordinator.dispatch.issuing import InStream, Issuer
from mlora_worker.coordinator.dispatch.reference_forwards import ReferenceForwards
from mlora_worker.coordinator.task.references import References, ReferenceTable
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.data.prepare import TokenRow
from mlora_worker.data.training_rows.reference_files import ReferenceFiles
from mlora_worker.pipeline.faults import Fault, Phase
from mlora_worker.protocol import FailureReason, TaskPhase
from mlora_worker.stream.items import Evaluate, Item
from mlora_worker.stream.rule import IssueRule
from tests.unit.worker.coordinator.dispatch.test_dispatcher import Play, prepared_task

PAIRS = 4
FORWARDS = 2  # one for the pairs of each step


def pair(token: int) -> TokenRow:
    labels = np.array([-100, 1, -100, -100, 2, -100], np.int32)
    return TokenRow(np.full(6, token, np.int32), labels, split=3)


def compared(
    name: str, *, first: int = 0, namespace: str = "n", reference: str | None = None, **training: Any
) -> TaskRun:
    rows = [pair(first + number) for number in range(PAIRS)]
    task = prepared_task(name, rows=rows, objective={"type": "dpo"}, **training)
    task.plan = task.plan.model_copy(update={"namespace": namespace})
    assert task.prepared is not None
    task.prepared = replace(task.prepared, reference_sha256=reference)
    return task


def forwards(most_rows: int = 1000, **options: Any) -> ReferenceForwards:
    rule, inside = IssueRule(1, 1000), InStream({})
    issuer = Issuer(
        stages=1,
        rule=rule,
        inside=inside,
        announce=lambda *_: None,
        on_change=lambda: None,
        clock=lambda: 0.0,
    )
    return ReferenceForwards(1, rule, inside, issuer, most_rows=most_rows, **options)


def table_of(one: ReferenceForwards, task: TaskRun) -> ReferenceTable:
    task.references = None
    one.join(task)
    found: References | None = task.references
    assert found is not None
    return found.train


def asked_of(items: list[Item]) -> list[Evaluate]:
    return [item for item in items if isinstance(item, Evaluate)]


def answer(play: Play, item: Evaluate, value: float) -> None:
    play.dispatcher.evaluated(item.number, torch.full((len(item.lengths),), value, dtype=torch.float64))


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (compared("b", learning_rate=0.5), True),
        (compared("b", namespace="m"), False),
        (compared("b", first=1), False),
        (compared("b", reference="adapter"), False),
    ],
    ids=["another rate", "another namespace", "other rows", "another reference"],
)
def test_a_table_is_for_the_same_rows_and_reference_in_one_namespace(other: TaskRun, shared: bool) -> None:
    one = forwards()
    assert (table_of(one, other) is table_of(one, compared("a"))) is shared


def test_of_more_pairs_than_may_be_kept_the_least_recently_used_go() -> None:
    one = forwards(most_rows=2 * PAIRS)
    first, second, third = (compared(name, first=10 * place) for place, name in enumerate("abc"))
    kept, lost = table_of(one, first), table_of(one, second)
    table_of(one, first)
    table_of(one, third)
    assert table_of(one, first) is kept
    assert table_of(one, second) is not lost


class SlowDisk(ReferenceFiles):
    """Remembers whether it was read while somebody was in the way."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "base")
        self.reads = 0

    def read(self, *arguments: Any) -> Any:
        self.reads += 1
        return super().read(*arguments)


def test_what_is_kept_on_disk_is_read_later_and_changes_nothing_without_the_lock(tmp_path: Path) -> None:
    task = compared("a")
    files, waiting, locked = SlowDisk(tmp_path), [], []
    first = forwards(files=files)
    table = table_of(first, task)
    table.learn(range(PAIRS), [float(-place) for place in range(2 * PAIRS)])
    first.leave(task)
    files.reads = 0
    one = forwards(files=files, later=waiting.append, with_lock=locked.append)
    table = table_of(one, task)
    assert (files.reads, table.reading, table.complete) == (0, True, False)
    for call in waiting:
        call()
    assert (files.reads, table.reading, table.complete) == (1, True, False)
    for call in locked:
        call()
    assert (table.reading, table.complete) == (False, True)
    assert table.of_rows([1]) == (-2.0, -3.0)


def test_nothing_is_asked_for_until_the_disk_has_answered(tmp_path: Path) -> None:
    task, waiting = compared("a"), []
    play = Play(task, references=ReferenceFiles(tmp_path, "base"), later=waiting.append)
    assert asked_of(play.run()) == []
    for call in waiting:
        call()
    assert len(asked_of(play.run())) == FORWARDS


def test_a_disk_that_fails_in_a_new_way_holds_nobody_up(tmp_path: Path) -> None:
    class Broken(ReferenceFiles):
        def read(self, *_: Any) -> Any:
            raise MemoryError

    task, waiting = compared("a"), []
    one = forwards(files=Broken(tmp_path, "base"), later=waiting.append)
    table = table_of(one, task)
    with pytest.raises(MemoryError):
        waiting[0]()
    assert not table.reading


def test_values_that_are_no_numbers_fail_the_task_and_are_asked_for_again_by_its_neighbour() -> None:
    task, neighbour = compared("a"), compared("b")
    play = Play(task, neighbour)
    asked = asked_of(play.run())
    assert [item.task for item in asked] == [task.uid] * FORWARDS
    for item in asked:
        answer(play, item, math.nan)
    assert task.failure is not None
    assert task.failure.reason is FailureReason.NON_FINITE_LOSS
    assert "the reference gives a row" in task.failure.message
    again = asked_of(play.run())
    assert [item.task for item in again] == [neighbour.uid] * FORWARDS
    for item in again:
        answer(play, item, -1.0)
    play.run()
    assert neighbour.phase is TaskPhase.SAVING


def test_forwards_that_a_fault_has_ended_are_made_again() -> None:
    task = compared("a")
    play = Play(task)
    first, second = asked_of(play.run())
    answer(play, second, -1.0)
    play.dispatcher.faulted(Fault(stage=0, number=first.number, phase=Phase.FORWARD, error="OSError: no"))
    (again,) = asked_of(play.run())
    assert (again.task, again.lengths, again.number > second.number) == (task.uid, first.lengths, True)
    answer(play, again, -1.0)
    play.run()
    assert (task.phase, task.failure) == (TaskPhase.SAVING, None)
