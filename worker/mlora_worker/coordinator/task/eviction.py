"""A task that left, or leaves, because memory ran out beside others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Eviction:
    tasks: int  # that were in the stream, with this one
    # Tasks outside the stream held so many bytes of this stage: it waits until they hold less.
    waits_for: tuple[int, int] | None = None
