"""Values that are read again and again rather than watched, but not at every wake, and not all at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mlora_worker.protocol import one_line

logger = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_AGE = 10.0  # seconds after which a value is read again: how late a corrected Secret is noticed
MISSING_AGE = 2.0  # the same for one that is not there, since someone is likely to make it now
# Of one kind: reads under way, and in one pass. Thousands of objects that tasks name are read in several passes, since a
# pass waits for what it reads.
AT_ONCE, MOST_READS = 16, 256
# Seconds until what could not be read is tried again: twice as long each time, so that one that can never be read costs
# neither the API server nor the log anything to speak of.
FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0
SHOWN_CAUSE = 300  # characters of an error that a status shows
SHOWN_KEYS = 5  # of those that could not be read, in one line of the log


@dataclass(frozen=True, slots=True)
class FailedReads:
    """Reads of one key that fail, since the last one that did not."""

    cause: str
    again_at: float
    times: int


@dataclass(frozen=True, slots=True)
class CachedValue(Generic[V]):
    value: V
    read_at: float


class ReadCache(Generic[K, V]):
    """Values of one kind by key. A read that fails leaves the former value in force, and is tried again later and later."""

    def __init__(
        self,
        kind: str,
        read: Callable[[K], Awaitable[V]],
        clock: Callable[[], float],
        at_once: int = AT_ONCE,
        most_reads: int = MOST_READS,
    ) -> None:
        self._kind = kind
        self._read = read
        self._clock = clock
        self._most_reads = most_reads
        self._turns = asyncio.Semaphore(at_once)
        self._known: dict[K, CachedValue[V]] = {}
        self._failing: dict[K, FailedReads] = {}
        self.later: frozenset[K] = (
            frozenset()
        )  # of what was wanted last, what is read for the first time later

    async def get(self, keys: Iterable[K], max_age: Callable[[V], float]) -> dict[K, V]:
        """Of ``keys``, what is known. What nobody has read yet goes first, then what is oldest."""
        wanted = dict.fromkeys(keys)
        self._known = {key: known for key, known in self._known.items() if key in wanted}
        self._failing = {key: failing for key, failing in self._failing.items() if key in wanted}
        due = sorted((key for key in wanted if self._is_due(key, max_age)), key=self._read_at)
        failed = [
            key
            for key in await asyncio.gather(*(self._refresh(key) for key in due[: self._most_reads]))
            if key is not None
        ]
        self.later = frozenset(
            key for key in due[self._most_reads :] if key not in self._known and key not in self._failing
        )
        if failed:
            shown = "; ".join(f"{key}: {self._failing[key].cause}" for key in failed[:SHOWN_KEYS])
            more = len(failed) - SHOWN_KEYS
            logger.warning("cannot read %s %s%s", self._kind, shown, f"; and {more} more" if more > 0 else "")
        return {key: known.value for key, known in self._known.items()}

    def values(self) -> Iterable[V]:
        return (known.value for known in self._known.values())

    def forget(self, key: K) -> None:
        """It is read again when it is next wanted."""
        self._known.pop(key, None)

    def unread(self) -> dict[K, str]:
        """Why what was wanted last could not be read, where nothing is known of it."""
        return {key: failing.cause for key, failing in self._failing.items() if key not in self._known}

    def _is_due(self, key: K, max_age: Callable[[V], float]) -> bool:
        failing = self._failing.get(key)
        if failing is not None:
            return self._clock() >= failing.again_at
        known = self._known.get(key)
        return known is None or self._clock() - known.read_at >= max_age(known.value)

    def _read_at(self, key: K) -> float:
        known = self._known.get(key)
        return known.read_at if known is not None else float("-inf")

    async def _refresh(self, key: K) -> K | None:
        """``key`` when it could not be read."""
        try:
            async with self._turns:
                value = await self._read(key)
            self._known[key] = CachedValue(value, self._clock())
        except Exception as error:
            times = self._failing[key].times + 1 if key in self._failing else 1
            wait = min(FIRST_RETRY * 2.0 ** min(times - 1, 16), LONGEST_RETRY)
            cause = one_line(str(error) or type(error).__name__)[:SHOWN_CAUSE]
            self._failing[key] = FailedReads(cause, self._clock() + wait, times)
            return key
        self._failing.pop(key, None)
        return None
