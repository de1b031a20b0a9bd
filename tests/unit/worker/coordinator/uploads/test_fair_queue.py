"""Who may try a store next: nobody waits for another's store, and a silent one is probed by one attempt at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlora_worker.coordinator.uploads.fair_queue import LONGEST_PAUSE, StoreTurns, Ticket, pauses

AWAY = ConnectionError("no answer in 60 s")
THREADS = 16


def tickets(count: int, tenant: str = "a", store: str | None = "s") -> list[Ticket]:
    return [Ticket(tenant, store) for _ in range(count)]


def entered(turns: StoreTurns, *waiting: Ticket, now: float = 0.0) -> list[Ticket]:
    for ticket in waiting:
        turns.enter(ticket, now)
    return turns.begin(now)


def silent(count: int = 64) -> tuple[StoreTurns, list[Ticket]]:
    """At time 0 a store has just been silent to all that tried it; with those that wait for it."""
    turns, waiting = StoreTurns(THREADS), tickets(count)
    for ticket in entered(turns, *waiting):
        turns.ended(ticket, 0.0, silence=AWAY)
        waiting.remove(ticket)
        ticket.failures, ticket.rests_until = 1, 1.0
        turns.enter(ticket, 0.0)
        waiting.append(ticket)
    return turns, waiting


def test_pauses_grow_to_half_a_minute_and_never_end() -> None:
    assert list(islice(pauses(), 8)) == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


@pytest.mark.parametrize(("threads", "most"), [(1, 1), (5, 2), (16, 6)])
def test_a_store_alone_gets_a_third_of_the_threads(threads: int, most: int) -> None:
    assert len(entered(StoreTurns(threads), *tickets(64))) == most


def test_however_many_stores_a_tenant_waits_for_it_holds_half_of_the_threads() -> None:
    many = [Ticket("a", number) for number in range(64)]
    assert len(entered(StoreTurns(THREADS), *many)) == THREADS // 2


def test_beside_one_that_fills_its_share_others_begin_at_once() -> None:
    turns = StoreTurns(THREADS)
    entered(turns, *(Ticket("a", number) for number in range(64)))
    for tenant in ("b", "c", "d"):
        mine = tickets(64, tenant)
        assert set(entered(turns, *mine)) & set(mine), tenant


def test_a_silent_store_is_probed_by_one_at_a_time_after_growing_pauses() -> None:
    turns, _ = silent()
    now, rested = 0.0, []
    for _ in range(8):
        assert turns.begin(now) == []
        wake = turns.wake_at(now)
        assert wake is not None
        rested.append(wake - now)
        [probe] = turns.begin(wake)
        assert turns.begin(wake + 240) == [], "a probe is under way"
        now = wake + 240  # it swallows requests
        assert turns.ended(probe, now, silence=AWAY)
        probe.failures, probe.rests_until = probe.failures + 1, now
        turns.enter(probe, now)
    assert rested == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_once_it_has_answered_all_that_waited_may_begin_as_there_is_room() -> None:
    turns, waiting = silent()
    [probe] = turns.begin(1.0)
    assert turns.ended(probe, 2.0, answered=True) == []
    now, left = 2.0, set(waiting) - {probe}
    while left:
        begun = turns.begin(now)
        assert len(begun) == 6 or set(begun) == left, "no pause lies between them"
        left -= set(begun)
        for ticket in begun:
            turns.ended(ticket, now, answered=True)
    assert turns.wake_at(now) is None


def test_a_probe_that_learnt_nothing_lets_the_next_one_probe_at_once() -> None:
    turns, _ = silent()
    [probe] = turns.begin(1.0)
    assert turns.ended(probe, 1.5) == []
    assert len(turns.begin(1.5)) == 1


def test_what_fails_by_its_own_doing_probes_after_those_that_have_not() -> None:
    turns = StoreTurns(THREADS)
    [bad] = entered(turns, Ticket("a", "s"))
    turns.ended(bad, 0.0, silence=AWAY)
    bad.failures = 7
    good = Ticket("a", "s")
    assert entered(turns, bad, good) == []
    assert turns.begin(1.0) == [good]


def test_what_comes_to_a_silent_store_is_told_so_and_other_stores_are_not_silent() -> None:
    turns, _ = silent()
    assert turns.silence_of(Ticket("a", "s")) is AWAY
    for other in (Ticket("b", "s"), Ticket("a", "t"), Ticket("a", None)):
        assert turns.silence_of(other) is None
        assert entered(turns, other) == [other], "with another bucket or other keys, it does not wait"


def test_who_leaves_waits_no_longer_and_holds_no_place() -> None:
    turns, waiting = silent(3)
    for ticket in waiting:
        assert turns.waits(ticket)
        assert turns.leave(ticket)
        assert not turns.waits(ticket)
        assert not turns.leave(ticket)
    assert turns.begin(10.0) == []
    assert turns.wake_at(0.0) is None


def test_a_silent_store_that_nobody_wants_any_more_is_forgotten() -> None:
    turns, waiting = silent(2)
    for ticket in waiting:
        turns.leave(ticket)
    turns.begin(10_000.0)
    assert turns.silence_of(Ticket("a", "s")) is None


# --- any number of tenants, stores and faults, played in time ---------------------------------------------------------


@dataclass
class Store:
    seconds: float  # that an attempt takes
    silent_until: float


@dataclass
class Play:
    """Each ticket goes on until its store answers it once. Time jumps to whatever happens next."""

    threads: int
    stores: dict[tuple[str, str], Store]
    now: float = 0.0
    running: dict[Ticket, float] = field(default_factory=dict)  # with the time at which each ends
    ready: dict[Ticket, float] = field(default_factory=dict)  # since when each could begin, were there room
    done: set[Ticket] = field(default_factory=set)
    pause: dict[Ticket, float] = field(default_factory=dict)
    tried: dict[object, float] = field(default_factory=dict)  # when a try at each store ended last

    def __post_init__(self) -> None:
        self.turns = StoreTurns(self.threads)

    def run(self, arrivals: list[tuple[float, Ticket]]) -> None:
        coming = sorted(arrivals, key=lambda one: one[0])
        while coming or len(self.done) < len(arrivals):
            wake = self.turns.wake_at(self.now)
            times = [wake, *self.running.values(), coming[0][0] if coming else None]
            following = [time for time in times if time is not None]
            assert following, "somebody waits, and nothing will ever happen"
            self.now = max(self.now, min(following))
            while coming and coming[0][0] <= self.now:
                self.enter(coming.pop(0)[1])
            for ticket in [one for one, end in self.running.items() if end <= self.now]:
                self.end(ticket)
            for ticket in self.turns.begin(self.now):
                self.running[ticket] = self.now + self.store_of(ticket).seconds
                del self.ready[ticket]
            self.check()

    def enter(self, ticket: Ticket) -> None:
        self.ready[ticket] = max(self.now, ticket.rests_until)
        self.turns.enter(ticket, self.now)

    def end(self, ticket: Ticket) -> None:
        del self.running[ticket]
        self.tried[ticket.key] = self.now
        if self.now >= self.store_of(ticket).silent_until:
            self.turns.ended(ticket, self.now, answered=True)
            self.done.add(ticket)
            return
        self.turns.ended(ticket, self.now, silence=AWAY)
        self.pause[ticket] = min(2 * self.pause.get(ticket, 0.5), LONGEST_PAUSE)
        ticket.failures, ticket.rests_until = ticket.failures + 1, self.now + self.pause[ticket]
        self.enter(ticket)

    def check(self) -> None:
        """What holds at any time."""
        free = self.threads - len(self.running)
        assert free >= 0
        at_work = Counter(ticket.tenant for ticket in self.running)
        at_stores = Counter(ticket.key for ticket in self.running)
        assert all(count <= (self.threads + 1) // 2 for count in at_work.values())
        probing = Counter(ticket.key for ticket in self.running if ticket.probes)
        assert all(count == 1 for count in probing.values())
        for ticket, since in self.ready.items():
            answers = self.turns.silence_of(ticket) is None
            if since <= self.now and answers and not at_work[ticket.tenant]:
                assert not free, "a tenant with nothing under way waits, though a thread is free"
            if since <= self.now and answers and not at_stores[ticket.key]:
                assert at_work[ticket.tenant] >= free, "a store waits for another one, though there is room"
            rested = max(since, self.tried.get(ticket.key, 0.0)) + LONGEST_PAUSE
            if rested < self.now and not answers and not at_stores[ticket.key]:
                assert at_work[ticket.tenant] >= free, "nobody probes a silent store, though there is room"

    def store_of(self, ticket: Ticket) -> Store:
        return self.stores[(ticket.tenant, str(ticket.store))]


@st.composite
def plays(draw: st.DrawFn) -> tuple[Play, list[tuple[float, Ticket]]]:
    names = draw(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), min_size=1, unique=True))
    seconds = st.sampled_from([0.1, 3.0, 60.0, 240.0])
    stores = {name: Store(draw(seconds), draw(st.sampled_from([0.0, 0.0, 100.0, 2000.0]))) for name in names}
    when = st.floats(0, 500, allow_nan=False)
    wanted = draw(st.lists(st.tuples(when, st.sampled_from(names)), min_size=1, max_size=40))
    arrivals = [(time, Ticket(tenant, store)) for time, (tenant, store) in wanted]
    return Play(draw(st.integers(1, 9)), stores), arrivals


@settings(max_examples=60, deadline=None)
@given(plays())
def test_whatever_is_silent_nobody_waits_for_anothers_store_while_threads_are_free(
    play: tuple[Play, list[tuple[float, Ticket]]],
) -> None:
    one, arrivals = play
    one.run(arrivals)
    assert len(one.done) == len(arrivals)
    assert one.turns.wake_at(one.now) is None
    assert one.turns.begin(one.now) == []


def test_64_blocked_uploads_delay_another_tenant_by_no_moment() -> None:
    away, here = Store(240.0, 20_000.0), Store(0.1, 0.0)
    play = Play(THREADS, {("a", "away"): away, ("a", "here"): here, ("b", "here"): here})
    blocked = [(0.0, Ticket("a", "away")) for _ in range(64)]
    others = [(float(at), Ticket(tenant, "here")) for at in range(1, 20_000, 199) for tenant in "ab"]
    waited: list[float] = []
    begin = play.turns.begin

    def begun(now: float) -> list[Ticket]:
        found = begin(now)
        waited.extend(now - play.ready[ticket] for ticket in found if ticket.store == "here")
        return found

    play.turns.begin = begun  # type: ignore[method-assign]
    play.run([*blocked, *others])
    assert len(waited) == len(others)
    assert max(waited) == 0.0
