"""Policy ``shortestRemaining``: among equal priorities, the task with the fewest tokens left first. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar

from mlora_operator.scheduling.entrant import Entrant, EntrantState

WORTH = 2.0  # how many times more a running task must have left than the one that preempts it


@dataclass(frozen=True, slots=True)
class ShortestRemaining:
    """1. The higher priority goes first.
    2. Of equal priority, the one with fewer tokens left (remaining steps times tokens of a step). One whose tokens are not
       known goes last.
    3. What is left of a task that has waited counts for less: after one ``hold_back`` half, after two a third, and so on
       (as in highest response ratio next, Brinch Hansen, 1971). So nobody waits for ever for shorter ones that keep coming.
    4. Of as many, the order of ``in_order``.
    5. A task preempts one of lower priority, and of one of equal priority that has at least ``WORTH`` times as
       much left, which counts for less in the same way by the time from when that one was created to its admission. What is
       left of a running task only shrinks, so the displaced one can never pay that back.
    """

    steady: ClassVar[bool] = False
    now: datetime | None = None  # None: nobody has waited
    hold_back: timedelta = timedelta()

    def order(self, entrants: Sequence[Entrant]) -> Sequence[Entrant]:
        return sorted(entrants, key=lambda one: (-one.task.priority, self._counts(one), one.task.key))

    def displaces(self, waiting: Entrant, running: Entrant) -> bool:
        if waiting.task.priority != running.task.priority:
            return waiting.task.priority > running.task.priority
        left = waiting.progress.remaining_tokens
        return left is not None and left * WORTH <= self._counts(running) and _left(running) > 0

    def _counts(self, one: Entrant) -> float:
        """What is left of it, as far as it counts."""
        if self.now is None:
            return _left(one)
        waited = self.now - one.since if one.state is EntrantState.WAITING else one.since - one.task.created
        if waited <= timedelta():
            return _left(one)
        return _left(one) / (1 + waited / self.hold_back) if self.hold_back else 0.0


def _left(entrant: Entrant) -> float:
    left = entrant.progress.remaining_tokens
    return math.inf if left is None else left
