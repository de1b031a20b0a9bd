"""Writes under way: a pass begins them and does not wait, so that a slow one holds up nobody but what it is about.

Each pass offers all that it wants written. What was offered before and is not begun yet is dropped: the new pass has
decided about it anew. What is under way is left alone; what a pass wants about the same comes again once it has ended.

What is patient has few slots of its own. An API server that is at its limit answers the slower the more it is asked at
once: who is waited for gets most of it, and the others follow as fast as it answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueuedWrite:
    """One write. ``write`` says whether it was done; ``has_lane``: it waits for no slot, because where it goes to nothing
    else goes to; ``patient``: nobody waits for it as for the others."""

    about: Hashable  # two writes about the same are never under way at once
    write: Callable[[], Awaitable[bool]]
    has_lane: bool = False
    patient: bool = False


def in_turn(due: Iterable[tuple[Hashable, QueuedWrite]]) -> list[QueuedWrite]:
    """The first of each owner, then the second of each, and so on; each owner's own in the order that they have. Patient
    ones are counted by themselves, since they have slots of their own.
    """
    seen: Counter[tuple[Hashable, bool]] = Counter()
    turns = []
    for owner, one in due:
        turns.append((seen[owner, one.patient], one))
        seen[owner, one.patient] += 1
    return [one for _, one in sorted(turns, key=lambda turn: turn[0])]


class WriteQueue:
    """At most ``at_once`` of those that have no lane of their own and are not patient, and ``patient_at_once`` of those
    that are.

    ``look_again`` is called when a pass is needed: with True soon, because a write failed; with False at once, because
    what a pass wanted was held up by one that has ended now.
    """

    def __init__(
        self, at_once: int, patient_at_once: int, look_again: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._at_once = {False: at_once, True: patient_at_once}  # by whether it is patient
        self._look_again = look_again
        self._waiting: dict[bool, deque[QueuedWrite]] = {False: deque(), True: deque()}
        self._last: deque[QueuedWrite] = deque()
        self._under_way: dict[Hashable, asyncio.Task[bool]] = {}
        self._slots_taken = {False: 0, True: 0}
        self._held_up: set[Hashable] = set()  # what an offer wanted while a write about it was under way
        self._failed = False

    def offer(self, wanted: Iterable[QueuedWrite]) -> None:
        """Begin these in their order, as slots come free. Returns at once."""
        for waiting in self._waiting.values():
            waiting.clear()
        self._held_up.clear()
        for one in wanted:
            if one.about in self._under_way:
                self._held_up.add(one.about)
            elif one.has_lane:
                self._begin(one)
            else:
                self._waiting[one.patient].append(one)
        self._begin_waiting()

    def add(self, one: QueuedWrite) -> None:
        """Begin it after all that is patient and has been offered. A new offer does not drop it."""
        self._last.append(one)
        self._begin_waiting()

    async def settled(self) -> bool:
        """Return once nothing waits or is under way: whether all of them were done since this was last asked."""
        while self._under_way:
            await asyncio.wait(self._under_way.values())
        failed, self._failed = self._failed, False
        return not failed

    async def close(self) -> None:
        """Break off what is under way, and forget what waits."""
        for waiting in (*self._waiting.values(), self._last):
            waiting.clear()
        broken_off = list(self._under_way.values())
        for task in broken_off:
            task.cancel()
        await asyncio.gather(*broken_off, return_exceptions=True)

    def _begin_waiting(self) -> None:
        for patient, waiting in self._waiting.items():
            queues = (waiting, self._last) if patient else (waiting,)
            while self._slots_taken[patient] < self._at_once[patient] and (
                queue := next(filter(None, queues), None)
            ):
                self._slots_taken[patient] += 1
                self._begin(queue.popleft())

    def _begin(self, one: QueuedWrite) -> None:
        task = asyncio.ensure_future(_written(one))
        self._under_way[one.about] = task
        task.add_done_callback(lambda done: self._ended(one, done))

    def _ended(self, one: QueuedWrite, done: asyncio.Task[bool]) -> None:
        del self._under_way[one.about]
        if not one.has_lane:
            self._slots_taken[one.patient] -= 1
        well = not done.cancelled() and done.result()
        self._failed = self._failed or not well
        self._begin_waiting()
        if done.cancelled():
            return
        if not well:
            self._look_again(True)
        elif one.about in self._held_up:
            self._held_up.discard(one.about)
            self._look_again(False)


async def _written(one: QueuedWrite) -> bool:
    try:
        return await one.write()
    except Exception:  # the writes report their failures; this is one that nobody expected
        logger.exception("a write about %s failed", one.about)
        return False
