"""How many tasks of one namespace may train at once: ``spec.namespaceLimits.training``. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mlora_operator.scheduling.entrant import Entrant, EntrantState
from mlora_operator.scheduling.first_come import first_come


def held_up(entrants: Sequence[Entrant], most: int | None) -> frozenset[str]:
    """The uids of those that may not be admitted now, since ``most`` tasks of their namespace are.

    Who is inside stays, and counts until it is out. Of those that wait, the first in order may follow; that its namespace
    is at its limit lets no task of it preempt another one of it.
    """
    if most is None:
        return frozenset()
    inside = Counter(one.task.namespace for one in entrants if one.state is not EntrantState.WAITING)
    over: set[str] = set()
    for one in first_come(entrants):
        if one.state is not EntrantState.WAITING:
            continue
        if inside[one.task.namespace] >= most:
            over.add(one.uid)
        else:
            inside[one.task.namespace] += 1
    return frozenset(over)
