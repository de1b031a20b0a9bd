"""A coroutine run to its end by a caller that is none, in a thread of its own: a notebook's thread has a loop already."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What the coroutine returns or raises. An interrupt cancels it, and is raised once it has ended."""
    result: Future[T] = Future()
    running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()
    listened_for = threading.Event()  # an interrupt, which would else leave the coroutine to itself

    async def noted() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.set_result((asyncio.get_running_loop(), task))
        return await make()

    def work() -> None:
        listened_for.wait()
        try:
            result.set_result(asyncio.run(noted()))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=work, name="mlora", daemon=True)
    thread.start()
    try:
        listened_for.set()
        return result.result()
    except KeyboardInterrupt:
        listened_for.set()
        loop, task = running.result()
        if not result.done():
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
