"""Priority, then first come; and who goes first of those that came in the same second. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby

from mlora_operator.scheduling.entrant import Entrant, EntrantState


def first_come(entrants: Iterable[Entrant]) -> list[Entrant]:
    """The entrants, first served first. Total: it does not depend on how they were listed.

    1. The higher priority goes first.
    2. Of equal priority, the one that was created first.
    3. Of those of one priority and second (the API server's resolution; ``kubectl apply`` of many makes such), those that
       are admitted, then those that wait.
    4. Of these that wait: while others wait, too, the one with the fewest tokens in all, since that is the least waiting
       (SPT; Smith, 1956). When nobody else waits, the one with the most: so that none of them trains alone in
       the end (LPT; Graham, 1969). Tokens count from the first step, so a step changes no order.
    5. Whose tokens are not known, behind the others; of as many, by namespace, name and uid.
    """
    ordered = sorted(entrants, key=_by_key)
    ranks = [one.task.rank for one in ordered]
    if len(set(ranks)) == len(ranks):
        return ordered
    waiting = sum(one.state is EntrantState.WAITING for one in ordered)
    found: list[Entrant] = []
    for _, group in groupby(ordered, key=_by_rank):
        together = list(group)
        if len(together) > 1:
            own = [one for one in together if one.state is EntrantState.WAITING]
            inside = [one for one in together if one.state is not EntrantState.WAITING]
            together = inside + sorted(own, key=_most_tokens if len(own) == waiting else _fewest_tokens)
        found += together
    return found


def _by_key(one: Entrant) -> tuple[object, ...]:
    return one.task.key


def _by_rank(one: Entrant) -> tuple[object, ...]:
    return one.task.rank


def _fewest_tokens(one: Entrant) -> float:
    tokens = one.progress.all_tokens
    return math.inf if tokens is None else tokens


def _most_tokens(one: Entrant) -> float:
    tokens = one.progress.all_tokens
    return math.inf if tokens is None else -tokens
