"""Waiting for submitted tasks, whichever namespaces they are in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing

from mlora_operator.cli.kube.client import JSON
from mlora_operator.cli.kube.retry import Clock, RetryTimeouts
from mlora_operator.cli.submit.applying import Submitted
from mlora_operator.cli.submit.follow import TaskSource, follow
from mlora_operator.cli.submit.outcomes import ResultTracker, TaskResult

Key = tuple[str, str]  # namespace and name
Seen = Callable[[JSON], None]

_TICK = 2.0  # seconds after which it is looked anew at what does not change


class Waiting:
    """The tasks that were submitted, as they are now, and how those ended that have.

    Kept outside of the waiting itself, which a timeout or the user may cut off.
    """

    def __init__(self, submitted: Sequence[Submitted], refused_after: float) -> None:
        self.tasks: dict[Key, JSON] = {(one.namespace, one.name): one.task for one in submitted}
        self.outcomes: dict[Key, TaskResult] = {}
        self._verdicts = {
            (one.namespace, one.name): ResultTracker(one.uid, refused_after) for one in submitted
        }

    @property
    def open(self) -> list[Key]:
        return [key for key in self.tasks if key not in self.outcomes]

    def look(self, seen: Seen, now: float) -> None:
        """``seen`` is told of each task that goes on, and a last time of each that has ended."""
        for key in self.open:
            task = self.tasks[key]
            outcome = self._verdicts[key].of(task or None, now)
            if outcome is not None:
                self.outcomes[key] = outcome
            if task:
                seen(task)

    def update(self, namespace: str, known: Mapping[str, JSON]) -> None:
        """All tasks of a namespace as they are now."""
        for key in self.open:
            if key[0] == namespace:
                self.tasks[key] = known.get(key[1], {})


async def wait_for(
    source: TaskSource, waiting: Waiting, patience: RetryTimeouts, seen: Seen, now: Clock
) -> None:
    """Returns when all have ended. Raises what ``follow`` raises."""
    waiting.look(seen, now())
    news: asyncio.Queue[tuple[str, dict[str, JSON]] | BaseException] = asyncio.Queue()
    namespaces = {namespace for namespace, _ in waiting.open}

    async def pass_on(namespace: str) -> None:
        names = [name for within, name in waiting.open if within == namespace]
        one = names[0] if len(names) == 1 else None
        changes = follow(source, namespace, one, patience, now, asyncio.sleep)
        try:
            async with aclosing(changes):
                async for known in changes:
                    news.put_nowait((namespace, known))
        except Exception as error:
            news.put_nowait(error)

    followers = [asyncio.create_task(pass_on(namespace)) for namespace in namespaces]
    try:
        while waiting.open:
            try:
                async with asyncio.timeout(_TICK):
                    change = await news.get()
            except TimeoutError:
                pass
            else:
                if isinstance(change, BaseException):
                    raise change
                waiting.update(*change)
            waiting.look(seen, now())
    finally:
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
