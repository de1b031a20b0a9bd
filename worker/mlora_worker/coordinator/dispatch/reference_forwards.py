"""Forwards that find out what a reference thinks of rows: which come next, and what they brought.

What is kept of a table on disk is read without the coordinator's lock, after the task was loaded: its steps, and forwards
for them, wait until that is here, and nobody else does.

They go between the microbatches that train, a few steps ahead of those that need them. Tasks of a namespace with the same
rows and the same reference have one table between them, also one after the other: a sweep pays once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from mlora_worker.coordinator.dispatch.issuing import InStream, Issuer
from mlora_worker.coordinator.dispatch.on_the_way import OnTheWay
from mlora_worker.coordinator.task.references import References, ReferenceTable
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.data.training_rows.reference_files import ReferenceFiles
from mlora_worker.data.training_rows.token_rows import TokenRow, digest_of
from mlora_worker.pipeline.mailbox import Entry
from mlora_worker.protocol import FailureReason, TaskPhase
from mlora_worker.stream.rule import IssueRule

_MOST_ROWS = 4_000_000  # of all tables that are kept after their tasks; of pairs 17 bytes each

# Namespace; digests of the rows, and of the adapter that is the reference; None: the base is.
Key = tuple[str, str, str | None]


@dataclass(frozen=True, slots=True)
class _Asked:
    task: TaskRun
    table: ReferenceTable
    rows: tuple[int, ...]


class ReferenceForwards:
    def __init__(
        self,
        stages: int,
        rule: IssueRule,
        inside: InStream,
        issuer: Issuer,
        files: ReferenceFiles | None = None,
        later: Callable[[Callable[[], None]], None] = lambda call: call(),
        with_lock: Callable[[Callable[[], None]], None] = lambda call: call(),
        most_rows: int = _MOST_ROWS,
    ) -> None:
        """``files``: where they are kept on disk; ``later`` makes a call that reads or writes there, without the lock, and
        ``with_lock`` one that changes something here. ``most_rows``: of all tables together; the least recently used ones
        go."""
        self._files, self._later = files if files is not None else ReferenceFiles(), later
        self._with_lock = with_lock
        self._rule, self._inside, self._issuer = rule, inside, issuer
        self._most_rows = most_rows
        self._tables: dict[Key, ReferenceTable] = {}  # the one that was asked for last is the last
        self._out = OnTheWay[_Asked](stages)

    def join(self, task: TaskRun) -> None:
        """Before it is loaded: what is known of its rows already."""
        preference, prepared = task.plan.training.preference, task.prepared
        if preference is None or not preference.has_reference or prepared is None:
            return
        if task.references is None:
            adapter = prepared.reference_sha256
            evaluation = None
            if prepared.evaluation is not None:
                evaluation = self._table(task, prepared.evaluation.rows)
            task.references = References(
                self._table(task, prepared.rows), prepared.steps, evaluation, whole=adapter is not None
            )
        task.references.restart()

    def leave(self, task: TaskRun) -> None:
        """It is unloaded: what was found out for it is kept."""
        if task.references is not None:
            for table in (task.references.train, task.references.evaluation):
                if table is not None and table.unsaved:
                    self._keep(table)

    def _keep(self, table: ReferenceTable) -> None:
        for key, one in self._tables.items():
            if one is table:
                self._later(partial(self._files.write, *key, table.to_keep()))

    def next(self) -> Entry | None:
        """None when nothing is wanted, or enough of them are on their way."""
        if self._out.full:
            return None
        for task in self._inside:
            if task.phase is not TaskPhase.TRAINING or task.leaving or task.references is None:
                continue
            wanted = _wanted(task, task.references)
            if wanted is None:
                continue
            table, rows, places = wanted
            some = self._microbatch(task, rows, places)
            table.asked.update(some)
            of_adapter = task.references.whole
            entry = self._issuer.refer(
                task, [rows[place] for place in some], "adapter" if of_adapter else "base"
            )
            self._out.sent(entry.item.number, _Asked(task, table, some))
            return entry
        return None

    def returned(self, number: int, values: Tensor) -> bool:
        """With [rows] log-probabilities. False for what is none of these."""
        asked = self._out.back(number)
        if asked is None:
            return False
        found: list[float] = values.tolist()
        if all(map(math.isfinite, found)):
            asked.table.learn(asked.rows, found)
            if asked.table.complete:
                self._keep(asked.table)
        else:
            self._give_up(asked)
            if not asked.task.finished:
                asked.task.fail(
                    FailureReason.NON_FINITE_LOSS,
                    "the reference gives a row a log-probability that is not a finite number: check the base model, and "
                    "the adapter of initFrom if there is one",
                )
        return True

    def lost(self, number: int) -> None:
        """It met a fault, so no values may come: they are asked for again."""
        asked = self._out.back(number)
        if asked is not None:
            self._give_up(asked)

    def _give_up(self, asked: _Asked) -> None:
        asked.table.asked.difference_update(asked.rows)
        for task in self._inside:
            references = task.references
            if references is not None and asked.table in (references.train, references.evaluation):
                references.restart()

    def _table(self, task: TaskRun, rows: Sequence[TokenRow]) -> ReferenceTable:
        assert task.prepared is not None
        key = task.plan.namespace, digest_of(rows), task.prepared.reference_sha256
        table = self._tables.pop(key, None)
        if table is None:
            preference = task.plan.training.preference
            assert preference is not None
            table = ReferenceTable.of(len(rows), 2 if preference.paired else 1)
            if self._files.keeps:
                table.reading = True
                self._later(partial(self._read, key, table))
        self._tables[key] = table
        held = sum(len(one.known) for one in self._tables.values())
        for former in [*self._tables][:-1]:
            if held <= self._most_rows:
                break
            held -= len(self._tables.pop(former).known)
        return table

    def _read(self, key: Key, table: ReferenceTable) -> None:
        """Without the lock."""
        kept = None
        try:
            kept = self._files.read(*key, *table.values.shape)
        finally:
            self._with_lock(lambda: table.take_up(kept))

    def _microbatch(self, task: TaskRun, rows: Sequence[TokenRow], places: Sequence[int]) -> tuple[int, ...]:
        """The first of ``places``, as many as a microbatch takes."""
        left = self._rule.budget_of([task.uid])
        some: list[int] = []
        for place in places:
            left -= len(rows[place].ids)
            if some and left < 0:
                break
            some.append(place)
        return tuple(some)


def _wanted(
    task: TaskRun, references: References
) -> tuple[ReferenceTable, Sequence[TokenRow], list[int]] | None:
    """What to ask for: rows of an evaluation go first."""
    assert task.prepared is not None
    if references.reading:
        return None
    evaluation = task.prepared.evaluation
    if evaluation is not None and references.evaluation is not None:
        places = references.wanted_to_evaluate() if references.whole or task.evaluation_is_due else []
        if places:
            return references.evaluation, evaluation.rows, places
    if task.progress.step < task.total_steps:
        places = references.wanted(task.progress.step + 1)
        if places:
            return references.train, task.prepared.rows, places
    return None
