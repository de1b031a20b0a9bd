"""Answers to one question about many objects, by what they were made of. Pure but for being changed.

Of thousands of tasks few move between two decisions; the objects of all others are the very same, and so is what follows
from them. An answer never depends on what is remembered: whoever asks names all that the answer is made of, all of that is
frozen, and what is equal says the same.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

V = TypeVar("V")


class Memoized(Generic[V]):
    """To one question about many objects, by uid. What nobody asked for between two ``turn`` is forgotten."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[tuple[Any, ...], V]] = {}
        self._now: dict[str, tuple[tuple[Any, ...], V]] = {}

    def known(self, uid: str, made_of: tuple[Any, ...]) -> V | None:
        """The answer that was made of the same. Tuples compare by identity first: quick where all is the same."""
        entry = self._before.get(uid)
        if entry is None or entry[0] != made_of:
            return None
        self._now[uid] = entry
        return entry[1]

    def last(self, uid: str) -> V | None:
        """As the decision before this one left it, whatever it was made of: who asks judges how far it still holds."""
        entry = self._before.get(uid)
        if entry is None:
            return None
        self._now.setdefault(uid, entry)
        return entry[1]

    def keep(self, uid: str, made_of: tuple[Any, ...], answer: V) -> V:
        self._now[uid] = made_of, answer
        return answer

    def turn(self) -> None:
        """A decision begins: what the one before was asked is what may be known."""
        self._before, self._now = self._now, {}
