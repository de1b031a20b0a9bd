"""Microbatches that go forward only and have not come back, and how many there may be of one kind."""

from __future__ import annotations

from typing import Generic, TypeVar

_AHEAD = 2  # in the pipeline, for each stage

What = TypeVar("What")  # what is known of one


class OnTheWay(Generic[What]):
    def __init__(self, stages: int) -> None:
        self._most = _AHEAD * stages
        self._out: dict[int, What] = {}  # by number of the item

    @property
    def full(self) -> bool:
        return len(self._out) >= self._most

    def sent(self, number: int, what: What) -> None:
        self._out[number] = what

    def back(self, number: int) -> What | None:
        """Of one that came back, or never will. None for what is none of these."""
        return self._out.pop(number, None)
