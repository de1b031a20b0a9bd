"""What the reference thinks of a task's rows: the log-probability of each answer, of a pair two, under the frozen base, or
under the adapter that the task began with. These never change, so a forward is spent once on a row.

What is computed for a row, and beside which others, does not depend on where a task was interrupted: rows are asked for
together as the first epoch's steps have them, in later epochs, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mlora_worker.data.training_rows.step_order import StepPlan

AHEAD = 8  # steps whose rows may be asked for before their turn
_TOGETHER = 64  # rows that are looked at in one go, where they are asked for in their order


@dataclass(slots=True, eq=False)
class ReferenceTable:
    """Of one set of rows."""

    values: npt.NDArray[np.float64]  # [rows, answers of each]
    known: npt.NDArray[np.bool_]  # [rows]
    asked: set[int] = field(default_factory=set)  # rows that are on their way through the pipeline
    unsaved: bool = False  # something was learnt since they were kept on disk
    reading: bool = False  # what is kept of them on disk is on its way: nothing is asked for until it is here

    @classmethod
    def of(cls, rows: int, answers: int = 2) -> ReferenceTable:
        return cls(np.zeros((rows, answers)), np.zeros(rows, np.bool_))

    def take_up(self, kept: npt.NDArray[np.float64] | None) -> None:
        """What was kept, of which a row that is not finite is not known. None: nothing was."""
        self.reading = False
        if kept is not None:
            found = np.isfinite(kept).all(axis=1) & ~self.known
            self.values[found], self.known[found] = kept[found], True

    def to_keep(self) -> npt.NDArray[np.float64]:
        """The opposite: a copy."""
        self.unsaved = False
        return np.where(self.known[:, None], self.values, np.nan)

    @property
    def complete(self) -> bool:
        return bool(self.known.all())

    def knows(self, rows: Sequence[int]) -> bool:
        return bool(self.known[list(rows)].all())

    def missing(self, rows: Iterable[int]) -> list[int]:
        """Those that are neither known nor asked for."""
        return [row for row in rows if not self.known[row] and row not in self.asked]

    def learn(self, rows: Sequence[int], values: Sequence[float]) -> None:
        """``values``: of each row one for each of its answers."""
        self.values[list(rows)] = np.reshape(values, (len(rows), -1))
        self.known[list(rows)] = True
        self.asked.difference_update(rows)
        self.unsaved = True

    def of_rows(self, rows: Sequence[int]) -> tuple[float, ...]:
        """Of each row one for each of its answers."""
        return tuple(self.values[list(rows)].ravel().tolist())


@dataclass(slots=True, eq=False)
class References:
    """Of one task. ``whole``: all must be known before the first step, since the adapter itself is the reference then."""

    train: ReferenceTable
    steps: StepPlan
    evaluation: ReferenceTable | None = None
    whole: bool = False
    _ready_step: int = 0  # the last step that is known to be ready
    _scanned: dict[str, int] = field(default_factory=dict)  # how far all is known or asked for
    _first: tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]] | None = (
        None  # the first epoch; the place of each row
    )

    @property
    def complete(self) -> bool:
        return self.train.complete and (self.evaluation is None or self.evaluation.complete)

    @property
    def reading(self) -> bool:
        return self.train.reading or (self.evaluation is not None and self.evaluation.reading)

    def ready(self, step: int) -> bool:
        """Whether ``step`` may be taken."""
        if self._ready_step != step:
            known = self.complete if self.whole else self.train.knows(self.steps.rows_of_step(step))
            self._ready_step = step if known else 0
        return self._ready_step == step

    def may_evaluate(self) -> bool:
        return self.evaluation is None or self.evaluation.complete

    def restart(self) -> None:
        """What was asked for may be lost, or the task goes on from elsewhere."""
        self._ready_step, self._scanned = 0, {}

    def wanted(self, step: int) -> list[int]:
        """Rows to ask for, so that ``step`` and those after it can be taken; none where enough are."""
        if self.whole:
            return self._in_order("train", self.train)
        scanned = max(self._scanned.get("steps", 0), step - 1)
        epoch_end = -(-step // self.steps.steps_per_epoch) * self.steps.steps_per_epoch
        last = min(step - 1 + AHEAD, epoch_end, self.steps.total_steps)
        missing: list[int] = []
        while scanned < last and not missing:
            missing = self.train.missing(self.steps.rows_of_step(scanned + 1))
            scanned += not missing
        self._scanned["steps"] = scanned
        return self._grouped(missing[0]) if missing and step > self.steps.steps_per_epoch else missing

    def wanted_to_evaluate(self) -> list[int]:
        return [] if self.evaluation is None else self._in_order("evaluation", self.evaluation)

    def _in_order(self, name: str, table: ReferenceTable) -> list[int]:
        count, scanned = len(table.known), self._scanned.get(name, 0)
        missing: list[int] = []
        while scanned < count and not missing:
            missing = table.missing(range(scanned, min(count, scanned + _TOGETHER)))
            scanned += 0 if missing else _TOGETHER
        self._scanned[name] = scanned
        return missing

    def _grouped(self, row: int) -> list[int]:
        """Those that were beside ``row`` in the first epoch."""
        if self._first is None:
            order = self.steps.first_epoch
            self._first = order, np.argsort(order, kind="stable")
        order, places = self._first
        start = int(places[row]) // self.steps.window * self.steps.window
        return self.train.missing(order[start : start + self.steps.window].tolist())
