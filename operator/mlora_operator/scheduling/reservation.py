"""When a task that waits for a place could have it at the earliest, counted in rounds. Pure.

A round is one step of every task in training. That makes remaining steps a clock that needs no measured speed: a task with
fewer steps left than another one is done before it, however fast the pipeline is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mlora_operator.scheduling.entrant import Entrant, State

# A task that passes one that is held back must be done in this part of the rounds that the latter has to wait.
SHARE = 0.5
LOOKED_AT = 8  # reservations; with more, the first task that may end is taken for all


def earliest_round(staying: Sequence[Entrant], fits_beside: Callable[[Iterable[str]], bool]) -> float:
    """Rounds until so many of ``staying`` are done that a task fits beside the others.

    ``fits_beside``: whether it fits beside these uids. A task that saves, or whose steps are not known, may be done at any
    time. Infinite when it does not fit even beside none.
    """
    by_end = sorted(staying, key=rounds_left)
    for ended, one in enumerate(by_end, start=1):
        if fits_beside(other.uid for other in by_end[ended:]):
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
