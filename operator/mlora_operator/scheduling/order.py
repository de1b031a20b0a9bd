"""The order in which tasks are considered. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property


@dataclass(frozen=True)
class Candidate:
    """Who a task is, and where it stands by what its user wrote."""

    uid: str
    namespace: str
    name: str
    priority: int
    created: datetime

    @cached_property
    def rank(self) -> tuple[int, datetime]:
        """Priority, then age: rules 1 and 2 of ``in_order``. Kept, as ``key`` is: asked for with every decision."""
        return (-self.priority, self.created)

    @cached_property
    def key(self) -> tuple[int, datetime, str, str, str]:
        """See ``sort_key``."""
        return (*self.rank, self.namespace, self.name, self.uid)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def in_order(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """The candidates, first served first.

    1. The higher priority goes first.
    2. Of equal priority, the one that was created first.
    3. Created in the same second (the API server's resolution), by namespace, then by name.
    4. A task that was deleted and made again may stand beside its former self: by uid, so that the order is
       total and the same on every machine.
    """
    return tuple(sorted(candidates, key=sort_key))


def sort_key(one: Candidate) -> tuple[int, datetime, str, str, str]:
    """The rules of ``in_order`` as a key."""
    return one.key


def between_namespaces(
    candidates: Iterable[Candidate], reach: Callable[[str], int | None]
) -> tuple[Candidate, ...]:
    """As ``in_order``, but a namespace's priorities count beside other namespaces' only up to its ``reach`` (None: as they
    are): so nobody goes before others by a priority that only its own namespace has agreed to.

    1. The turns are those of ``in_order`` with each priority taken for its namespace's reach where it is higher.
    2. The turns of a namespace are its own tasks' in the order of ``in_order``.
    """
    listed = in_order(candidates)
    if len({one.namespace for one in listed}) < 2:
        return listed
    own: defaultdict[str, deque[Candidate]] = defaultdict(deque)
    for one in listed:
        own[one.namespace].append(one)
    most = {namespace: reach(namespace) for namespace in own}

    def turn(one: Candidate) -> tuple[int, datetime, str, str, str]:
        bound = most[one.namespace]
        priority = one.priority if bound is None else min(one.priority, bound)
        return (-priority, *one.key[1:])

    return tuple(own[one.namespace].popleft() for one in sorted(listed, key=turn))
