"""Passes begin writes and do not wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from mlora_operator.reconcile.cluster.write_queue import QueuedWrite, WriteQueue


@dataclass
class Post:
    """Writes that end when a test says so, and what was asked for meanwhile."""

    at_once: int = 2
    begun: list[str] = field(default_factory=list)
    asked: list[bool] = field(default_factory=list)
    _ends: dict[str, asyncio.Future[bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.deliveries = WriteQueue(self.at_once, 1, self.asked.append)

    async def offer(self, *names: str, lanes: tuple[str, ...] = (), patient: tuple[str, ...] = ()) -> None:
        self.deliveries.offer(
            QueuedWrite(name, self._write(name), name in lanes, name in patient)
            for name in (*names, *patient)
        )
        await self.turn()

    async def add(self, name: str) -> None:
        self.deliveries.add(QueuedWrite(name, self._write(name), patient=True))
        await self.turn()

    async def end(self, name: str, *, well: bool = True) -> None:
        self._ends.pop(name).set_result(well)
        await self.turn()

    async def turn(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    def _write(self, name: str) -> Callable[[], Awaitable[bool]]:
        async def write() -> bool:
            self.begun.append(name)
            self._ends[name] = asyncio.get_running_loop().create_future()
            return await self._ends[name]

        return write


@pytest.fixture
async def post() -> AsyncIterator[Post]:
    made = Post()
    yield made
    await made.deliveries.close()


async def test_they_begin_in_their_order_as_slots_come_free(post: Post) -> None:
    await post.offer("a", "b", "c", "d")
    assert post.begun == ["a", "b"]
    await post.end("b")
    assert post.begun == ["a", "b", "c"]


async def test_what_is_not_begun_yet_gives_way_to_what_a_later_pass_wants(post: Post) -> None:
    await post.offer("old-1", "old-2", "old-3", "old-4")
    await post.offer("new", "old-4")
    await post.end("old-1")
    assert post.begun == ["old-1", "old-2", "new"], "old-3 is not wanted any more"


async def test_two_about_the_same_are_never_under_way_at_once(post: Post) -> None:
    await post.offer("a")
    await post.offer("a", "b")
    assert post.begun == ["a", "b"]
    assert post.asked == []
    await post.end("b")
    assert post.asked == [], "nothing was held up by this one"
    await post.end("a")
    assert post.asked == [False], "the pass whose write was held up has to come again"


async def test_one_that_fails_asks_for_another_pass_and_holds_nothing_up(post: Post) -> None:
    await post.offer("a", "b", "c")
    await post.end("a", well=False)
    assert post.asked == [True]
    assert post.begun == ["a", "b", "c"]


async def test_a_coordinator_that_takes_no_plan_holds_up_nothing_but_its_own_plans(post: Post) -> None:
    lanes = ("plan-1", "plan-2", "plan-3")
    await post.offer(*lanes, "a", "b", "c", lanes=lanes)
    assert post.begun == [*lanes, "a", "b"]
    await post.end("plan-1")
    assert post.begun == [*lanes, "a", "b"], "its lane is no slot for others"


async def test_settled_waits_for_all_and_says_once_that_one_failed(post: Post) -> None:
    await post.offer("a", "b", "c")
    whole = asyncio.ensure_future(post.deliveries.settled())
    for name in ("a", "b"):
        await post.end(name, well=name != "a")
        assert not whole.done()
    await post.end("c")
    assert await whole is False
    assert await post.deliveries.settled() is True


async def test_an_error_that_nobody_expected_is_a_failure_and_leaks_no_slot() -> None:
    asked: list[bool] = []
    deliveries = WriteQueue(1, 1, asked.append)
    begun = []

    async def breaks() -> bool:
        raise RuntimeError("nobody expected this")

    async def works() -> bool:
        begun.append("works")
        return True

    deliveries.offer([QueuedWrite("a", breaks), QueuedWrite("b", works)])
    assert await deliveries.settled() is False
    assert asked == [True]
    assert begun == ["works"]


async def test_closed_it_breaks_off_what_is_under_way_and_asks_for_nothing(post: Post) -> None:
    await post.offer("a", "b", "c")
    await post.deliveries.close()
    assert await post.deliveries.settled() is False
    assert post.begun == ["a", "b"]
    assert post.asked == []


async def test_what_is_patient_has_slots_of_its_own_and_takes_none_of_the_others(post: Post) -> None:
    await post.offer("a", "b", "c", patient=("p", "q", "r"))
    assert post.begun == ["a", "b", "p"]
    await post.end("p")
    assert post.begun == ["a", "b", "p", "q"]
    await post.end("a")
    assert post.begun == ["a", "b", "p", "q", "c"]


async def test_what_was_added_comes_after_what_is_patient_and_no_offer_drops_it(post: Post) -> None:
    await post.offer(patient=("p", "old"))
    await post.add("event-1")
    await post.add("event-2")
    await post.offer("a", patient=("q",))
    for name, begun in (("p", "q"), ("q", "event-1"), ("event-1", "event-2")):
        await post.end(name)
        assert post.begun[-1] == begun
    await post.end("a")
    await post.end("event-2")
    assert await post.deliveries.settled()
    assert post.begun == ["p", "a", "q", "event-1", "event-2"]
