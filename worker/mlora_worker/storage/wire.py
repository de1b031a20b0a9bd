"""Answers over HTTP as they come off the socket: how slowly, and how much that is no part of a body.

The usual clients wait for each byte anew and bound neither the header, nor how often a server says that it will go on soon,
nor what stands between the chunks of a body: a server that never ends would hold its reader for good, or fill its memory.
Bodies themselves are counted by whoever reads them.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeVar

LEAST_RATE: Final = 1024  # bytes a second, on average; a server that sends less would keep a thread for days
GRACE_SECONDS: Final = 60.0  # of waiting, before the rate counts
# The same where something was written: a store that puts a large object together answers late.
_WRITING_GRACE: Final = 900.0
_READS = ("GET", "HEAD")
_LONGEST_HEADER: Final = 2**20  # bytes, all lines together
# Of a body with its frame, which is the size of each chunk and what follows the last one: so many bytes for each of those
# that were read or asked for, and some more.
_FRAME_FACTOR, _FRAME_BYTES = 8, 2**20
_LONGEST_WHOLE: Final = 8 * 2**20  # of a body that is read without a word how long it may be

Connection = TypeVar("Connection", bound=http.client.HTTPConnection)
Clock = Callable[[], float]


class BadAnswer(Exception):
    """The server sends too slowly, or without end; ``str(error)`` says how, and begins with a verb."""


class WatchedResponse(http.client.HTTPResponse):
    def __init__(
        self,
        sock: socket.socket,
        debuglevel: int = 0,
        method: str | None = None,
        url: str | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(sock, debuglevel, method, url)
        raw: Any = self.fp.detach()  # it holds the socket open, and goes on doing so
        self._watched = _Watched(raw, GRACE_SECONDS if method in _READS else _WRITING_GRACE, clock)
        self.fp = io.BufferedReader(self._watched)
        self._given = 0  # bytes of its body

    def begin(self) -> None:
        with self._watched.up_to(_LONGEST_HEADER, "a header"):
            super().begin()

    def read(self, amt: int | None = None) -> bytes:
        with self._framed(amt):
            return self._counted(super().read(amt))

    def read1(self, n: int = -1) -> bytes:
        with self._framed(n if n >= 0 else None):
            return self._counted(super().read1(n))

    def readinto(self, buffer: Any) -> int:
        with self._framed(len(buffer)):
            count = super().readinto(buffer)
            self._given += count
            return count

    def _framed(self, amount: int | None) -> contextlib.AbstractContextManager[None]:
        body = self._given + (_LONGEST_WHOLE if amount is None else amount)
        return self._watched.up_to(_LONGEST_HEADER + _FRAME_BYTES + _FRAME_FACTOR * body, "an answer")

    def _counted(self, piece: bytes) -> bytes:
        self._given += len(piece)
        return piece


class _Watched(io.RawIOBase):
    """What arrives, and how long it was waited for; what a reader does in between is not counted."""

    def __init__(self, raw: io.RawIOBase, grace: float, clock: Clock) -> None:
        self._raw, self._grace, self._clock = raw, grace, clock
        self._bytes = 0
        self._waited = 0.0
        self._end: int | None = None  # bytes, since the beginning
        self._what = ""

    @contextlib.contextmanager
    def up_to(self, end: int, what: str) -> Iterator[None]:
        """Raises BadAnswer where more than ``end`` bytes have arrived since the beginning."""
        self._end, self._what = end, what
        try:
            yield
        finally:
            self._end = None

    def readinto(self, buffer: Any) -> int | None:
        began = self._clock()
        count: int | None = self._raw.readinto(buffer)
        self._waited += self._clock() - began
        self._bytes += count or 0
        if self._end is not None and self._bytes > self._end:
            raise BadAnswer(f"sent {self._what} that does not end")
        if count and self._waited > self._grace and self._bytes < LEAST_RATE * self._waited:
            raise BadAnswer(
                f"sent {self._bytes} bytes in {self._waited:.0f} s, which is less than {LEAST_RATE / 1024:g} KiB/s: "
                f"use a faster store"
            )
        return count

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def close(self) -> None:
        self._raw.close()
        super().close()


def watched(kind: type[Connection], clock: Clock = time.monotonic) -> type[Connection]:
    """``kind`` of connection, whose answers are watched. Reading from it raises BadAnswer."""
    return type(
        kind.__name__, (kind,), {"response_class": staticmethod(partial(WatchedResponse, clock=clock))}
    )
