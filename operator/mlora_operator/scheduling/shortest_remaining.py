"""Policy ``shortestRemaining``: among equal priorities, the task with the fewest tokens left first. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from mlora_operator.scheduling.entrant import Entrant, State

WORTH = 2.0  # how many times more a running task must have left than the one that takes its place


@dataclass(frozen=True, slots=True)
class ShortestRemaining:
    """1. The higher priority goes first.
    2. Of equal priority, one that has waited for ``hold_back``; of those, the one that has waited longest.
    3. Then the one with fewer tokens left (remaining steps times tokens of a step). One whose tokens are not known goes
       last.
    4. Of as many, the order of ``in_order``.
    5. A task takes the place of one of lower priority, and of one of equal priority that has at least ``WORTH`` times as
       much left. What is left of a running task only shrinks, so the displaced one can never pay that back.
    6. One that was made ``hold_back`` or more before it got its place keeps it against its equals for ``hold_back``: else
       short tasks would send a long one away as soon as it has begun, again and again.
    """

    now: datetime | None = None  # None: nobody has waited for long
    hold_back: timedelta = timedelta()

    def order(self, entrants: Sequence[Entrant]) -> Sequence[Entrant]:
        return sorted(entrants, key=self._key)

    def displaces(self, waiting: Entrant, running: Entrant) -> bool:
        if waiting.task.priority != running.task.priority:
            return waiting.task.priority > running.task.priority
        if self._keeps_its_place(running):
            return False
        left = waiting.progress.remaining_tokens
        return left is not None and left * WORTH <= _left(running) and _left(running) > 0

    def _key(self, one: Entrant) -> tuple[object, ...]:
        if self.now is not None and one.state is State.WAITING and self.now - one.since >= self.hold_back:
            return (-one.task.priority, False, one.since, one.task.key)
        return (-one.task.priority, True, _left(one), one.task.key)

    def _keeps_its_place(self, one: Entrant) -> bool:
        if self.now is None or self.now - one.since >= self.hold_back:
            return False
        return one.since - one.task.created >= self.hold_back


def _left(entrant: Entrant) -> float:
    left = entrant.progress.remaining_tokens
    return math.inf if left is None else left
