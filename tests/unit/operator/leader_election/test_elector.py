"""Of several replicas one acts, whatever happens to the others, to the network and to the clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlora_operator.leader_election.elector import (
    Elector,
    Lease,
    LeaseTimes,
    NotLeader,
    ObservedLease,
    Overtaken,
    may_take,
    observe,
)
from tests.fixtures.stories import stories

TERMS = LeaseTimes(duration=15, deadline=10, renew_every=2, look_every=1)


def lease(holder: str, version: str = "1", duration: float = 15) -> Lease:
    return Lease(holder=holder, duration=duration, transitions=0, version=version)


@pytest.mark.parametrize(
    ("story", "seen", "now", "taken"),
    [
        ("there is none", ObservedLease(None, 0), 0, True),
        ("it was released", ObservedLease(lease(""), 0), 0, True),
        ("it is our own", ObservedLease(lease("me"), 0), 0, True),
        ("another has just renewed it", ObservedLease(lease("other"), 0), 1, False),
        ("a moment before it ends", ObservedLease(lease("other"), 0), 14.9, False),
        ("it was not renewed for its duration", ObservedLease(lease("other"), 0), 15, True),
        ("its holder asked for longer than we do", ObservedLease(lease("other", duration=60), 0), 30, False),
    ],
)
def test_a_lease_is_taken_only_when_nobody_acts(
    story: str, seen: ObservedLease, now: float, taken: bool
) -> None:
    assert may_take(seen, "me", now) is taken, story


def test_a_renewal_starts_the_wait_anew_and_the_same_lease_does_not() -> None:
    first = observe(None, lease("other", "1"), 0)
    assert observe(first, lease("other", "1"), 9).since == 0
    assert observe(first, lease("other", "2"), 9).since == 9


def test_terms_in_which_two_could_act_are_refused() -> None:
    with pytest.raises(ValueError, match="deadline < duration"):
        LeaseTimes(duration=10, deadline=10)


class World:
    """A clock and one lease, whose server may be away. With ``lossy`` writes are slow and the answer of some is lost."""

    def __init__(self, lossy: random.Random | None = None) -> None:
        self.lossy = lossy
        self.now = 0.0
        self.lease: Lease | None = None
        self.down = False

    async def read(self) -> Lease | None:
        if self.down:
            raise ConnectionError("no route")
        return self.lease

    def _wait(self) -> None:
        self.now += self.lossy.uniform(0, 4) if self.lossy is not None else 0

    async def write(self, former: Lease | None, holder: str, duration: float) -> Lease:
        if self.down:
            raise ConnectionError("no route")
        self._wait()
        if former != self.lease:
            raise Overtaken("it is another version")
        changed = former is None or holder not in ("", former.holder)
        transitions = (former.transitions if former else 0) + changed
        version = str(int(former.version) + 1 if former else 1)
        self.lease = Lease(holder, duration, transitions, version)
        self._wait()
        if self.lossy is not None and self.lossy.random() < 0.2:
            raise TimeoutError("the answer was lost")
        return self.lease


def elector(world: World, me: str) -> Elector:
    return Elector(world, me, TERMS, lambda: world.now)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110  # what is waited for is a state, not an event
            await asyncio.sleep(0.01)


async def attempt(one: Elector) -> None:
    await one._attempt(5)


@settings(max_examples=stories(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    steps=st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", "cut", "mend"]), st.floats(0.0, 9.0)), max_size=60
    ),
)
def test_no_two_may_act_at_the_same_time(seed: int, steps: list[tuple[str, float]]) -> None:
    """Each step lets time pass, in which all but one replica may be frozen; then one of them does what it does."""
    world = World(random.Random(seed))
    replicas = {name: elector(world, name) for name in "abc"}

    async def run() -> None:
        for what, pause in steps:
            world.now += pause
            if what in replicas:
                await attempt(replicas[what])
            else:
                world.down = what == "cut"
            assert sum(one.leads for one in replicas.values()) <= 1

    asyncio.run(run())


def fast(world_clock: Callable[[], float], store: World, me: str) -> Elector:
    return Elector(store, me, LeaseTimes(0.6, 0.4, 0.05, 0.02), world_clock)


async def test_the_end_of_the_leader_hands_over_at_once() -> None:
    """Real time, small numbers."""
    world = World()
    clock = asyncio.get_running_loop().time
    order: list[str] = []

    def work(name: str) -> Callable[[], Awaitable[None]]:
        async def stay() -> None:
            order.append(f"{name} begins")
            try:
                await asyncio.Event().wait()
            finally:
                order.append(f"{name} ends")

        return stay

    first = asyncio.create_task(fast(clock, world, "a").run(work("a")))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(fast(clock, world, "b").run(work("b")))
    await asyncio.sleep(0.2)
    assert order == ["a begins"]
    before = clock()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await until(lambda: len(order) >= 3)
    assert order == ["a begins", "a ends", "b begins"]
    assert clock() - before < 0.4, "well before the lease would have ended by itself"
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert world.lease is not None
    assert world.lease.holder == ""


async def test_without_an_answer_the_work_ends_at_the_deadline_and_begins_anew_after_it() -> None:
    world = World()
    clock = asyncio.get_running_loop().time
    one = fast(clock, world, "a")
    order: list[tuple[str, float]] = []

    async def stay() -> None:
        order.append(("begins", clock()))
        try:
            await asyncio.Event().wait()
        finally:
            order.append(("ends", clock()))

    running = asyncio.create_task(one.run(stay))
    await asyncio.sleep(0.1)
    world.down, cut = True, clock()
    await until(lambda: len(order) >= 2)
    with pytest.raises(NotLeader):
        one.permit()
    world.down = False
    await until(lambda: len(order) >= 3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [what for what, _ in order][:3] == ["begins", "ends", "begins"]
    assert order[1][1] - cut <= 0.6, "before another could have begun"


async def test_a_frozen_leader_is_refused_before_its_first_write() -> None:
    world = World()
    a, b = elector(world, "a"), elector(world, "b")
    await attempt(a)
    a.permit()
    await attempt(b)
    world.now = 15.0  # a did nothing all this time
    await attempt(b)
    b.permit()
    with pytest.raises(NotLeader):
        a.permit()
    await attempt(a)
    assert not a.leads
    assert b.leads


async def test_a_process_of_the_same_pod_goes_on_with_the_lease_of_the_one_before() -> None:
    world = World()
    await attempt(elector(world, "pod-1"))
    again = elector(world, "pod-1")
    await attempt(again)
    assert again.leads
