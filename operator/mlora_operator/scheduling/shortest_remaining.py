"""Policy ``shortestRemaining``: among equal priorities, the task with the fewest tokens left first. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlora_operator.scheduling.entrant import Entrant

WORTH = 2.0  # how many times more a running task must have left than the one that takes its place


class ShortestRemaining:
    """1. The higher priority goes first.
    2. Of equal priority, the one with fewer tokens left (remaining steps times tokens of a step). One whose tokens are not
       known goes last.
    3. Of as many, the order of ``in_order``.
    4. A task takes the place of one of lower priority, and of one of equal priority that has at least ``WORTH`` times as
       much left. What is left of a running task only shrinks, so the displaced one can never pay that back.
    """

    def order(self, entrants: Sequence[Entrant]) -> Sequence[Entrant]:
        return sorted(entrants, key=lambda one: (-one.task.priority, _left(one), one.task.key))

    def displaces(self, waiting: Entrant, running: Entrant) -> bool:
        if waiting.task.priority != running.task.priority:
            return waiting.task.priority > running.task.priority
        left = waiting.progress.remaining_tokens
        return left is not None and left * WORTH <= _left(running) and _left(running) > 0


def _left(entrant: Entrant) -> float:
    left = entrant.progress.remaining_tokens
    return math.inf if left is None else left
