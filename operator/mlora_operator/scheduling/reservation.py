"""Whether a task may pass those that are held back: only when it is done before any of them could begin. Pure.

A round is one step of every task in training. That makes remaining steps a clock that needs no measured speed: a task with
fewer steps left than another one is done before it, however fast the pipeline is.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlora_operator.scheduling.entrant import Entrant, EntrantState

# A task that passes must be done in this part of the rounds until the first of those who stay may be done: nobody who is
# held back can begin before that, and the other half is a reserve.
SHARE = 0.5


def first_end(staying: Iterable[Entrant]) -> float:
    """Rounds until the first of them may be done, and give its room to one who is held back."""
    return min(map(rounds_left, staying), default=0.0)


def rounds_left(entrant: Entrant) -> float:
    """At least so many rounds until the task is done: 0 while it saves, or when its steps are not known."""
    steps = entrant.progress.remaining_steps
    return 0.0 if entrant.state is EntrantState.SAVING or steps is None else float(steps)


def is_over_by(entrant: Entrant, rounds: float) -> bool:
    """Whether a task that begins now is surely done when so many rounds have passed."""
    step, total, _ = entrant.progress
    return total is not None and total - step <= SHARE * rounds
