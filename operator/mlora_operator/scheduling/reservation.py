"""When a task that waits for a place could have it at the earliest, counted in rounds. Pure.

A round is one step of every task in training. That makes remaining steps a clock that needs no measured speed: a task with
fewer steps left than another one is done before it, however fast the pipeline is.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlora_operator.scheduling.entrant import Entrant, State
from mlora_operator.scheduling.room import Held, Memory

# A task that passes one that is held back must be done in this part of the rounds that the latter has to wait.
SHARE = 0.5
LOOKED_AT = 8  # reservations; with more, the first task that may end is taken for all


def earliest_round(staying: Iterable[Entrant], memory: Memory[Held], uid: str) -> float:
    """Rounds until so many of ``staying`` are done that the task ``uid`` fits beside the others.

    A task that saves, or whose steps are not known, may be done at any time. 0 when it fits beside all of them.
    """
    beside = memory.held((uid,))
    for one in sorted(staying, key=rounds_left, reverse=True):  # who stays longest is there for sure
        beside = memory.plus(beside, one.task.uid)
        if not memory.fits(beside):
            return rounds_left(one)
    return 0.0


def rounds_left(entrant: Entrant) -> float:
    """At least so many rounds until the task is done."""
    steps = entrant.progress.remaining_steps
    return 0.0 if entrant.state is State.SAVING or steps is None else float(steps)


def is_over_by(entrant: Entrant, rounds: float) -> bool:
    """Whether a task that begins now is surely done when so many rounds have passed."""
    steps = entrant.progress.remaining_steps
    return steps is not None and steps <= SHARE * rounds
