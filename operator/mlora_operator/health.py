"""The liveness probe. It proves that passes succeed and that every watch is there.

That passes end is not enough: one that fails ends, too, and decides nothing for anybody. Nor is a process that answers:
when a watch of kopf dies, the rest of it lives on and sees nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aiohttp import web


@dataclass(frozen=True, slots=True)
class Liveness:
    """``problems`` in words; none means healthy."""

    problems: tuple[str, ...] = ()


FAILURES = 3  # passes in a row; fewer may be of a moment, however long they take


@dataclass(frozen=True, slots=True)
class FailureStreak:
    """Of passes, in a row until now: since so many seconds, so many times, the last one with ``words``."""

    seconds: float
    times: int
    words: str


def examine(
    silence: float | None,
    most: float,
    watched: Iterable[str],
    running: Iterable[str],
    failures: FailureStreak | None = None,
) -> Liveness:
    """``silence``: seconds since a pass ended, None before the first; ``watched``: plurals that must have a watch;
    ``running``: names of the tasks that are alive, kopf's watches among them; ``failures``: None while passes succeed.
    ``most``: seconds that it may last that no pass ends, or none succeeds. Pure."""
    names = tuple(running)
    problems = [
        f"no watch on {plural}"
        for plural in watched
        if not any(name.startswith(f"watcher for {plural}.") for name in names)
    ]
    if silence is not None and silence > most:
        problems.append(f"no reconcile pass has finished for {silence:.0f} s")
    if failures is not None and failures.seconds > most and failures.times >= FAILURES:
        problems.append(
            f"{failures.times} consecutive passes failed within {failures.seconds:.0f} s, the last one with "
            f"{failures.words}"
        )
    return Liveness(tuple(problems))


def running_tasks() -> tuple[str, ...]:
    """Names of the asyncio tasks of this loop that are not done."""
    return tuple(task.get_name() for task in asyncio.all_tasks() if not task.done())


async def serve_health(port: int, check: Callable[[], Liveness]) -> web.AppRunner:
    """Serve ``/healthz`` on all addresses until the runner is cleaned up: 200, or 503 with the problems."""

    async def healthz(_: web.Request) -> web.Response:
        health = check()
        return web.Response(
            status=503 if health.problems else 200,
            text="".join(f"{line}\n" for line in health.problems or ("ok",)),
        )

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host=None, port=port).start()
    return runner
