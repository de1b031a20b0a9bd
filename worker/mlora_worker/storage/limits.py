"""Bounds on what stores, web servers and hubs say: none of it is believed. Pure."""

from __future__ import annotations

import re
from typing import Final

LARGEST_OBJECT: Final = 2**50  # bytes; the largest that any store has are far smaller
LONGEST_NAME: Final = 1024  # bytes of a key or a path, as S3 has it
DOCUMENT: Final = 2**20  # bytes of a manifest or a configuration
MOST_LISTED: Final = 100_000  # objects below one folder
_LONGEST_LISTING: Final = 32 * 2**20  # characters of all names together
_SIZE = re.compile(r"[0-9]{1,16}")


class Oversized(ValueError):
    """``str(error)`` says what of it is too much, and begins with a verb."""


def size_in(text: str | None) -> int | None:
    """Of a file, as a header has it; None where it has none that a file could have."""
    if text is None or not _SIZE.fullmatch(text.strip()):
        return None
    size = int(text)
    return size if size <= LARGEST_OBJECT else None


class Listing:
    """Names that a store lists, as long as it is a list that can be held."""

    def __init__(self, most: int) -> None:
        self.names: list[str] = []
        self._most = most
        self._characters = 0

    def add(self, name: str) -> None:
        """Raises Oversized."""
        if len(name.encode("utf-8", "surrogatepass")) > LONGEST_NAME:
            raise Oversized(f"has a name of more than {LONGEST_NAME} bytes ({name[:40]!r}...)")
        if len(self.names) == self._most:
            raise Oversized(f"has more than {self._most} objects")
        self._characters += len(name)
        if self._characters > _LONGEST_LISTING:
            raise Oversized(f"has names of more than {_LONGEST_LISTING / 2**20:g} MiB together")
        self.names.append(name)
