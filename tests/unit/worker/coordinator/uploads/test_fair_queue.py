"""Who may try a store next: nobody waits for another's store, and a silent one is probed by one attempt at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlora_worker.coordinator.uploads.fair_queue import LONGEST_PAUSE, FairQueue, Ticket, pauses
from tests.fixtures.stories import stories

AWAY = ConnectionError("no answer in 60 s")
THREADS = 16


def tickets(count: int, tenant: str = "a", store: str | None = "s") -> list[Ticket]:
    return [Ticket(tenant, store) for _ in range(count)]


def entered(queue: FairQueue, *waiting: Ticket, now: float = 0.0) -> list[Ticket]:
    for ticket in waiting:
        queue.enter(ticket, now)
    return queue.begin(now)


def silent(count: int = 64) -> tuple[FairQueue, list[Ticket]]:
    """At time 0 a store has just been silent to all that tried it; with those that wait for it."""
    queue, waiting = FairQueue(THREADS), tickets(count)
    for ticket in entered(queue, *waiting):
        queue.ended(ticket, 0.0, silence=AWAY)
        waiting.remove(ticket)
        ticket.failures, ticket.rests_until = 1, 1.0
        queue.enter(ticket, 0.0)
        waiting.append(ticket)
    return queue, waiting


def test_pauses_grow_to_half_a_minute_and_never_end() -> None:
    assert list(islice(pauses(), 8)) == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


@pytest.mark.parametrize(("threads", "most"), [(1, 1), (5, 2), (16, 6)])
def test_a_store_alone_gets_a_third_of_the_threads(threads: int, most: int) -> None:
    assert len(entered(FairQueue(threads), *tickets(64))) == most


def test_however_many_stores_a_tenant_waits_for_it_holds_half_of_the_threads() -> None:
    many = [Ticket("a", number) for number in range(64)]
    assert len(entered(FairQueue(THREADS), *many)) == THREADS // 2


def test_beside_one_that_fills_its_share_others_begin_at_once() -> None:
    queue = FairQueue(THREADS)
    entered(queue, *(Ticket("a", number) for number in range(64)))
    for tenant in ("b", "c", "d"):
        mine = tickets(64, tenant)
        assert set(entered(queue, *mine)) & set(mine), tenant


def test_a_silent_store_is_probed_by_one_at_a_time_after_growing_pauses() -> None:
    queue, _ = silent()
    now, rested = 0.0, []
    for _ in range(8):
        assert queue.begin(now) == []
        wake = queue.wake_at(now)
        assert wake is not None
        rested.append(wake - now)
        [probe] = queue.begin(wake)
        assert queue.begin(wake + 240) == [], "a probe is under way"
        now = wake + 240  # it swallows requests
        assert queue.ended(probe, now, silence=AWAY)
        probe.failures, probe.rests_until = probe.failures + 1, now
        queue.enter(probe, now)
    assert rested == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_once_it_has_answered_all_that_waited_may_begin_as_there_is_room() -> None:
    queue, waiting = silent()
    [probe] = queue.begin(1.0)
    assert queue.ended(probe, 2.0, answered=True) == []
    now, left = 2.0, set(waiting) - {probe}
    while left:
        begun = queue.begin(now)
        assert len(begun) == 6 or set(begun) == left, "no pause lies between them"
        left -= set(begun)
        for ticket in begun:
            queue.ended(ticket, now, answered=True)
    assert queue.wake_at(now) is None


def test_a_probe_that_learnt_nothing_lets_the_next_one_probe_at_once() -> None:
    queue, _ = silent()
    [probe] = queue.begin(1.0)
    assert queue.ended(probe, 1.5) == []
    assert len(queue.begin(1.5)) == 1


def test_what_fails_by_its_own_doing_probes_after_those_that_have_not() -> None:
    queue = FairQueue(THREADS)
    [bad] = entered(queue, Ticket("a", "s"))
    queue.ended(bad, 0.0, silence=AWAY)
    bad.failures = 7
    good = Ticket("a", "s")
    assert entered(queue, bad, good) == []
    assert queue.begin(1.0) == [good]


def test_what_comes_to_a_silent_store_is_told_so_and_other_stores_are_not_silent() -> None:
    queue, _ = silent()
    assert queue.silence_of(Ticket("a", "s")) is AWAY
    for other in (Ticket("b", "s"), Ticket("a", "t"), Ticket("a", None)):
        assert queue.silence_of(other) is None
        assert entered(queue, other) == [other], "with another bucket or other keys, it does not wait"


def test_who_leaves_waits_no_longer_and_holds_no_place() -> None:
    queue, waiting = silent(3)
    for ticket in waiting:
        assert queue.waits(ticket)
        assert queue.leave(ticket)
        assert not queue.waits(ticket)
        assert not queue.leave(ticket)
    assert queue.begin(10.0) == []
    assert queue.wake_at(0.0) is None


def test_a_silent_store_that_nobody_wants_any_more_is_forgotten() -> None:
    queue, waiting = silent(2)
    for ticket in waiting:
        queue.leave(ticket)
    queue.begin(10_000.0)
    assert queue.silence_of(Ticket("a", "s")) is None


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
        self.queue = FairQueue(self.threads)

    def run(self, arrivals: list[tuple[float, Ticket]]) -> None:
        coming = sorted(arrivals, key=lambda one: one[0])
        while coming or len(self.done) < len(arrivals):
            wake = self.queue.wake_at(self.now)
            times = [wake, *self.running.values(), coming[0][0] if coming else None]
            following = [time for time in times if time is not None]
            assert following, "somebody waits, and nothing will ever happen"
            self.now = max(self.now, min(following))
            while coming and coming[0][0] <= self.now:
                self.enter(coming.pop(0)[1])
            for ticket in [one for one, end in self.running.items() if end <= self.now]:
                self.end(ticket)
            for ticket in self.queue.begin(self.now):
                self.running[ticket] = self.now + self.store_of(ticket).seconds
                del self.ready[ticket]
            self.check()

    def enter(self, ticket: Ticket) -> None:
        self.ready[ticket] = max(self.now, ticket.rests_until)
        self.queue.enter(ticket, self.now)

    def end(self, ticket: Ticket) -> None:
        del self.running[ticket]
        self.tried[ticket.key] = self.now
        if self.now >= self.store_of(ticket).silent_until:
            self.queue.ended(ticket, self.now, answered=True)
            self.done.add(ticket)
            return
        self.queue.ended(ticket, self.now, silence=AWAY)
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
            answers = self.queue.silence_of(ticket) is None
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


@settings(max_examples=stories(60), deadline=None)
@given(plays())
def test_whatever_is_silent_nobody_waits_for_anothers_store_while_threads_are_free(
    play: tuple[Play, list[tuple[float, Ticket]]],
) -> None:
    one, arrivals = play
    one.run(arrivals)
    assert len(one.done) == len(arrivals)
    assert one.queue.wake_at(one.now) is None
    assert one.queue.begin(one.now) == []


def test_64_blocked_uploads_delay_another_tenant_by_no_moment() -> None:
    away, here = Store(240.0, 20_000.0), Store(0.1, 0.0)
    play = Play(THREADS, {("a", "away"): away, ("a", "here"): here, ("b", "here"): here})
    blocked = [(0.0, Ticket("a", "away")) for _ in range(64)]
    others = [(float(at), Ticket(tenant, "here")) for at in range(1, 20_000, 199) for tenant in "ab"]
    waited: list[float] = []
    begin = play.queue.begin

    def begun(now: float) -> list[Ticket]:
        found = begin(now)
        waited.extend(now - play.ready[ticket] for ticket in found if ticket.store == "here")
        return found

    play.queue.begin = begun  # type: ignore[method-assign]
    play.run([*blocked, *others])
    assert len(waited) == len(others)
    assert max(waited) == 0.0
