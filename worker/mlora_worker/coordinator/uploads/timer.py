"""Calls that are made after a while."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class DelayedCalls:
    """One thread makes all the calls, so that what waits holds no thread. They have to be short."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._order = itertools.count()  # of calls that are due at the same time
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._thread: threading.Thread | None = None

    def start(self) -> DelayedCalls:
        """Its thread, unless it is there. Best before the machine may lack one: ``__call__`` does it too. Raises
        RuntimeError where there is none."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="later", daemon=True)
                thread.start()
                self._thread = thread
        return self

    def __call__(self, seconds: float, call: Callable[[], None]) -> None:
        """Returns at once. Raises as ``start`` does; the call is made all the same, once a later one finds a thread."""
        with self._changed:
            heapq.heappush(self._waiting, (time.monotonic() + seconds, next(self._order), call))
            self._changed.notify()
        self.start()

    def _run(self) -> None:
        while True:
            call = self._next()
            try:
                call()
            except Exception:  # the others are still to be called
                log.exception("a delayed call failed")

    def _next(self) -> Callable[[], None]:
        """Waits until one is due."""
        with self._changed:
            while True:
                left = self._waiting[0][0] - time.monotonic() if self._waiting else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._waiting)[2]
                self._changed.wait(left)
