"""Who of several replicas may act: one, by a Lease of the API server. kopf has no such thing.

Why two never act at once:

1. A candidate takes a lease that is free, or one that was not renewed for as long as its holder asked for. It measures
   that on its own clock, from when it first saw the lease as it is: clocks of two machines are never compared.
2. Every write of the lease names the version that was read, so of two candidates one wins.
3. The holder may act until ``deadline`` seconds after it *asked* for its last renewal. That is less than ``duration``, so
   it has ended ``duration - deadline`` seconds before another may begin, whatever the network does.
4. It looks at the clock before each single write (``permit``). A process that was frozen and comes back finds that its
   time is over before it has done anything.

The rest of a write that was already on its way when the time ended has the seconds between the two to arrive. What comes
even later is refused by others: statuses name the version that they are about, plans a generation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

logger = logging.getLogger(__name__)

ATTEMPT_WITHIN = 5.0  # seconds for the requests of one attempt
RELEASE_WITHIN = 3.0  # seconds that the end of the process may wait for


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds. ``duration``: after which others may take over; ``deadline``: after which the holder stops."""

    duration: float = 15.0
    deadline: float = 10.0
    renew_every: float = 2.0
    look_every: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.look_every <= self.renew_every < self.deadline < self.duration:
            raise ValueError("a lease needs look_every <= renew_every < deadline < duration")


@dataclass(frozen=True, slots=True)
class Lease:
    """As the API server has it. ``holder`` is empty once it was released."""

    holder: str
    duration: float  # seconds, as the holder asked for
    transitions: int  # how often the holder changed: the number of the term
    version: str


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A lease (None: there is none) and since when, on the candidate's own clock, it has been just so."""

    lease: Lease | None
    since: float


def observe(former: ObservedLease | None, lease: Lease | None, now: float) -> ObservedLease:
    """Pure."""
    return former if former is not None and former.lease == lease else ObservedLease(lease, now)


def may_take(seen: ObservedLease, me: str, now: float) -> bool:
    """Whether ``me`` may write itself into the lease. Pure.

    1. There is no lease, or nobody holds it.
    2. It is held by ``me``: to be renewed, or left by a process of the same pod, which has ended.
    3. Its holder has not renewed it for as long as it asked for.
    """
    lease = seen.lease
    if lease is None or lease.holder in ("", me):
        return True
    return now - seen.since >= lease.duration


class NotLeader(Exception):
    """A write was held back: this replica's time to act is over."""


class Overtaken(Exception):
    """Somebody wrote the lease since it was read."""


class LeaseStore(Protocol):
    async def read(self) -> Lease | None:
        """The lease as it is now."""

    async def write(self, former: Lease | None, holder: str, duration: float) -> Lease:
        """Replace ``former`` and nothing else. Raises Overtaken."""


class LeaseHolder(Enum):
    MINE = "mine"
    ANOTHERS = "another's"
    UNKNOWN = "unknown"  # no answer, or somebody wrote in between


class Elector:
    """Campaigns, works while it leads, and campaigns again. ``clock`` must go on while the process stands still."""

    def __init__(self, store: LeaseStore, me: str, terms: LeaseTimes, clock: Callable[[], float]) -> None:
        self.me = me
        self._store = store
        self._terms = terms
        self._clock = clock
        self._seen: ObservedLease | None = None
        self._mine: Lease | None = None  # as last written by us; None when that is not known for certain
        self._until = float("-inf")
        self._campaigned = False
        self.last_attempt = clock()  # when an attempt last came to its end, well or not

    @property
    def leads(self) -> bool:
        return self._clock() < self._until

    @property
    def holder(self) -> str:
        """Who held the lease when it was last read or written; empty: nobody, or that is not known."""
        lease = self._seen.lease if self._seen is not None else None
        return lease.holder if lease is not None else ""

    @property
    def silence(self) -> float:
        """Seconds since the lease was last seen to."""
        return self._clock() - self.last_attempt

    def permit(self) -> None:
        """To be called before each write. Raises NotLeader."""
        if not self.leads:
            raise NotLeader("this replica no longer holds the lease")

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Until cancelled: ``work`` runs, anew in each term, while this replica leads. Then the lease is free."""
        try:
            while True:
                if await self._attempt(ATTEMPT_WITHIN) is LeaseHolder.MINE:
                    await self._lead(work)
                await asyncio.sleep(self._terms.look_every)
        finally:
            await self._release()

    async def _lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Returns when the term is over, after ``work`` was cancelled."""
        assert self._mine is not None
        term = self._mine.transitions
        logger.info("%s leads, term %d", self.me, term)
        task = asyncio.ensure_future(work())
        pause = self._terms.renew_every
        try:
            while True:
                left = self._until - self._clock()
                await asyncio.wait({task}, timeout=max(0.0, min(pause, left)))
                if task.done():
                    return await task
                outcome = await self._attempt(max(0.1, min(ATTEMPT_WITHIN, self._until - self._clock())))
                another = self._mine is not None and self._mine.transitions != term
                if outcome is LeaseHolder.ANOTHERS or another or not self.leads:
                    logger.warning(
                        "%s is no longer the leader: the lease could not be renewed in time", self.me
                    )
                    return None
                pause = self._terms.renew_every if outcome is LeaseHolder.MINE else self._terms.look_every
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not self.leads:
                self._mine = None

    async def _attempt(self, within: float) -> LeaseHolder:
        """One try to take or to renew."""
        try:
            async with asyncio.timeout(within):
                return await self._take()
        except Overtaken:
            self._mine = None
            return LeaseHolder.UNKNOWN
        except Exception as error:
            self._mine = None  # the write may have been done
            logger.warning("the lease could not be read or written: %s", str(error) or type(error).__name__)
            return LeaseHolder.UNKNOWN
        finally:
            self.last_attempt = self._clock()

    async def _take(self) -> LeaseHolder:
        lease = self._mine
        if lease is None:
            lease = await self._store.read()
            self._seen = observe(self._seen, lease, self._clock())
            if not may_take(self._seen, self.me, self._clock()):
                if lease is not None and self.leads:
                    self._until = float("-inf")  # at once: another holds it
                return LeaseHolder.ANOTHERS
        self._campaigned = True
        asked = self._clock()
        self._mine = await self._store.write(lease, self.me, self._terms.duration)
        self._seen = ObservedLease(self._mine, asked)
        self._until = asked + self._terms.deadline
        return LeaseHolder.MINE

    async def _release(self) -> None:
        """Others need not wait then. Only what is still ours is given away."""
        self._until = float("-inf")
        if not self._campaigned:
            return
        try:
            async with asyncio.timeout(RELEASE_WITHIN):
                lease = await self._store.read()
                if lease is not None and lease.holder == self.me:
                    await self._store.write(lease, "", 1)
                    logger.info("%s has released the lease", self.me)
        except Exception as error:
            logger.warning("the lease could not be released: %s", str(error) or type(error).__name__)


def suspend_clock() -> float:
    """Seconds that go on while the process is frozen and, where the system has such a clock, the machine too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
