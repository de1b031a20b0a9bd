"""How often a coordinator may tell of another model. Pure.

What follows from a model's shape is worked out once and remembered: which modules each task adapts, what that takes of each
stage. Workers have one shape for as long as they run, and another one only after their pipeline was changed. One that tells
of another with each report would keep the operator at work, and fill its memory, for everybody.
"""

from __future__ import annotations

from collections import deque
from datetime import datetime, timedelta

from mlora_worker.protocol import ModelFacts, Report, StageReport

MOST = 8  # other shapes than the one before, WITHIN so long
WITHIN = timedelta(hours=1)

Shape = tuple[ModelFacts | None, tuple[StageReport, ...]]


class Unsteady(Exception):
    """``str(error)`` says what changes too often."""


class Shapes:
    """Of one coordinator."""

    def __init__(self) -> None:
        self._run: str | None = None
        self._shape: Shape | None = None  # of that run, or of the last one that told of any
        self._changes: deque[datetime] = deque(maxlen=MOST)

    def check(self, report: Report, now: datetime) -> None:
        """Raises Unsteady for a report of another shape in the course of a run, or too soon after too many others."""
        if report.facts is None and not report.stages:
            return
        shape = report.facts, report.stages
        if self._shape is None or shape == self._shape:
            self._run, self._shape = report.run_id, shape
            return
        if report.run_id == self._run:
            raise Unsteady("its workers report another model, or other stages, than at their start")
        if len(self._changes) == MOST and timedelta() <= now - self._changes[0] < WITHIN:
            raise Unsteady(
                f"its workers have reported {MOST} other models or stages within {WITHIN.total_seconds() / 60:.0f} "
                f"minutes"
            )
        self._changes.append(now)
        self._run, self._shape = report.run_id, shape
