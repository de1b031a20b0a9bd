"""The order in which tasks are considered. Pure."""

from __future__ import annotations

from collections.abc import Iterable
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
