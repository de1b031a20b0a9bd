"""Passes that fail, one after the other. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_WORDS = 300  # characters of an error


@dataclass(frozen=True, slots=True)
class FailedPasses:
    """``times`` in a row, the first at ``since`` (monotonic seconds), the last with ``words``."""

    since: float
    times: int
    words: str


def failed_again(before: FailedPasses | None, error: Exception, now: float) -> FailedPasses:
    """Type and message of an error may be of many lines; the probe answers on one."""
    text = f"{type(error).__name__}: {error}"
    words = "".join(one if one.isprintable() else " " for one in text[:_WORDS]).strip()
    since, times = (before.since, before.times) if before is not None else (now, 0)
    return FailedPasses(since, times + 1, words)
