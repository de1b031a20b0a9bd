"""Who may try a store next, of all who want one. Pure: time is passed in.

Attempts share a few threads, and one at a store that swallows requests holds its thread for minutes. So that nobody waits
for another's store:

1. *Room.* An attempt may begin while those that run for its tenant, and those at its store once more, are fewer than
   the threads that are free. A tenant that is alone gets half of the threads, one store of it a third; however many stores
   of it are silent, some threads are left for the others.
2. *Silence.* A store that gave no answer is probed by one attempt at a time, after pauses that grow, and not before the
   time that a busy one named. All others that want
   it hold no thread meanwhile, and may begin when it has answered, if only to refuse. The next probe is the one that has
   failed least often, then the one that waits longest: what fails by its own doing does not stand before the others.
3. *Rest.* An attempt that failed rests for its own pause, whatever its store does.
4. *Turn.* Among those that may begin, the tenant with the fewest running attempts is first, then the one whose last turn is
   longest ago; of its stores the one whose last turn is longest ago; of its attempts the one that came first.

A store is what one tenant wants with one set of keys: a store that ignores one tenant's keys says nothing of another's.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

_Key = tuple[str, Hashable]  # tenant and store

LONGEST_PAUSE = 30.0  # seconds
_FORGET = 600.0  # seconds after which a silent store that nobody wants is forgotten


def pauses(first: float = 1.0, longest: float = LONGEST_PAUSE) -> Iterator[float]:
    """Seconds between tries, without end."""
    while True:
        yield first
        first = min(2 * first, longest)


@dataclass(slots=True, eq=False)
class Ticket:
    """One attempt on its way, from ``enter`` to its end."""

    tenant: str
    store: Hashable  # None: it wants no store
    failures: int = 0
    rests_until: float = 0.0
    probes: bool = field(default=False, init=False)
    number: int = field(default=0, init=False)  # of its arrival

    @property
    def key(self) -> _Key:
        return self.tenant, self.store


@dataclass(slots=True)
class _Store:
    """Of one tenant."""

    waiting: dict[Ticket, None] = field(default_factory=dict)  # in order of arrival
    running: int = 0
    silence: Exception | None = None  # what was seen of it last; None: it answers
    pauses: Iterator[float] = field(default_factory=pauses)
    probe_at: float = 0.0
    probed: bool = False  # at this moment


@dataclass(slots=True)
class _Tenant:
    wanted: dict[_Key, None] = field(default_factory=dict)  # stores that somebody waits for, in their turn
    running: int = 0
    last_turn: int = -1


class FairQueue:
    """Not thread-safe."""

    def __init__(self, threads: int) -> None:
        self._free = threads
        self._stores: dict[_Key, _Store] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._resting: list[tuple[float, int, Ticket]] = []  # a heap; what was taken out is passed over
        self._rests: set[Ticket] = set()
        self._silent: set[_Key] = set()
        self._arrivals, self._turn = itertools.count(), itertools.count()

    def enter(self, ticket: Ticket, now: float) -> None:
        """It waits from now on, and rests first where its own pause is not over."""
        ticket.number = next(self._arrivals)
        if ticket.rests_until > now:
            heapq.heappush(self._resting, (ticket.rests_until, ticket.number, ticket))
            self._rests.add(ticket)
        else:
            self._queue(ticket)

    def leave(self, ticket: Ticket) -> bool:
        """It waits no longer; False where it did not."""
        if ticket in self._rests:
            self._rests.discard(ticket)
            return True
        store = self._stores.get(ticket.key)
        if store is None or ticket not in store.waiting:
            return False
        self._unqueue(ticket)
        self._tidy(ticket)
        return True

    def waits(self, ticket: Ticket) -> bool:
        store = self._stores.get(ticket.key)
        return ticket in self._rests or (store is not None and ticket in store.waiting)

    def silence_of(self, ticket: Ticket) -> Exception | None:
        """What the store that it wants was silent with; None where it answers or was never asked."""
        store = self._stores.get(ticket.key)
        return store.silence if store is not None else None

    def begin(self, now: float) -> list[Ticket]:
        """All that may begin now. They run until ``ended``."""
        while self._resting and self._resting[0][0] <= now:
            _, number, ticket = heapq.heappop(self._resting)
            if ticket in self._rests and ticket.number == number:
                self._rests.discard(ticket)
                self._queue(ticket)
        self._forget_silent(now)
        begun: list[Ticket] = []
        while (next_one := self._next(now)) is not None:
            begun.append(next_one)
        return begun

    def ended(
        self,
        ticket: Ticket,
        now: float,
        *,
        answered: bool = False,
        silence: Exception | None = None,
        rest: float = 0.0,
    ) -> list[Ticket]:
        """``rest``: seconds for which the store asks to be left alone.

        Neither ``answered`` nor ``silence``: nothing was seen of the store. Returns who waits for a store that was just
        found silent, or silent still."""
        store, tenant = self._stores[ticket.key], self._tenants[ticket.tenant]
        store.running -= 1
        tenant.running -= 1
        self._free += 1
        probed, ticket.probes = ticket.probes, False
        if probed:
            store.probed = False
        waiting: list[Ticket] = []
        if ticket.store is not None:
            if answered:
                store.silence, store.pauses = None, pauses()
                self._silent.discard(ticket.key)
            elif silence is not None:
                if probed or store.silence is None:  # else others have said so already
                    store.probe_at = now + max(next(store.pauses), rest)
                    waiting = list(store.waiting)
                store.silence = silence
                self._silent.add(ticket.key)
        self._tidy(ticket)
        return waiting

    def wake_at(self, now: float) -> float | None:
        """When ``begin`` may find something that it did not find ``now``, though nothing ends or enters before."""
        while self._resting and self._resting[0][2] not in self._rests:
            heapq.heappop(self._resting)
        times = [self._resting[0][0]] if self._resting else []
        for key in self._silent:
            store = self._stores[key]
            if store.waiting and not store.probed and store.probe_at > now:
                times.append(store.probe_at)
        return min(times, default=None)

    # --- one by one -----------------------------------------------------------------------------------------------

    def _next(self, now: float) -> Ticket | None:
        tenants = [tenant for tenant in self._tenants.values() if tenant.wanted]
        for tenant in sorted(tenants, key=lambda one: (one.running, one.last_turn)):
            if tenant.running >= self._free:
                return None
            for key in tenant.wanted:
                ticket = self._of(self._stores[key], tenant, now)
                if ticket is not None:
                    self._run(ticket, tenant)
                    return ticket
        return None

    def _of(self, store: _Store, tenant: _Tenant, now: float) -> Ticket | None:
        first = next(iter(store.waiting))
        at_store = store.running if first.store is not None else 0
        if tenant.running + at_store >= self._free:
            return None
        if store.silence is None:
            return first
        if store.probed or now < store.probe_at:
            return None
        probe = min(store.waiting, key=lambda one: one.failures)
        probe.probes = store.probed = True
        return probe

    def _run(self, ticket: Ticket, tenant: _Tenant) -> None:
        self._unqueue(ticket)
        if ticket.key in tenant.wanted:  # its store's turn is over
            tenant.wanted[ticket.key] = tenant.wanted.pop(ticket.key)
        self._stores[ticket.key].running += 1
        tenant.running += 1
        tenant.last_turn = next(self._turn)
        self._free -= 1

    def _queue(self, ticket: Ticket) -> None:
        self._stores.setdefault(ticket.key, _Store()).waiting[ticket] = None
        self._tenants.setdefault(ticket.tenant, _Tenant()).wanted.setdefault(ticket.key)

    def _unqueue(self, ticket: Ticket) -> None:
        store = self._stores[ticket.key]
        del store.waiting[ticket]
        if not store.waiting:
            del self._tenants[ticket.tenant].wanted[ticket.key]

    def _tidy(self, ticket: Ticket) -> None:
        """What nobody needs is not held for ever."""
        store = self._stores.get(ticket.key)
        if store is not None and not store.waiting and not store.running and store.silence is None:
            del self._stores[ticket.key]
        tenant = self._tenants.get(ticket.tenant)
        if tenant is not None and not tenant.wanted and not tenant.running:
            del self._tenants[ticket.tenant]

    def _forget_silent(self, now: float) -> None:
        for key in list(self._silent):
            store = self._stores[key]
            if not store.waiting and not store.running and store.probe_at + _FORGET < now:
                self._silent.discard(key)
                del self._stores[key]
