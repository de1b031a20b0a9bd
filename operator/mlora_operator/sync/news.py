"""What a pass reports: each change that it made, and each problem that it left."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NewsKind(StrEnum):
    ADDED = "added"
    REPLACED = "replaced"
    REMOVED = "removed"
    LOADED = "loaded"
    RELOADED = "reloaded"
    UNLOADED = "unloaded"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class News:
    """``name``: of the adapter; empty where a problem is of a store or a server. ``place``: where it comes from, or where
    it is. ``cause``: of a problem, the error behind it, whose type says how a command ends.
    """

    kind: NewsKind
    name: str
    place: str
    message: str
    cause: Exception | None = None

    @property
    def key(self) -> tuple[NewsKind, str, str, str]:
        """Equal for two that say the same."""
        return (self.kind, self.name, self.place, self.message)


def problem(name: str, place: str, cause: Exception) -> News:
    return News(NewsKind.PROBLEM, name, place, str(cause) or type(cause).__name__, cause)
