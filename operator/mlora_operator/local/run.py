"""One local run: the operator's loop over files and processes, until every task has ended."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from mlora_operator.api import pipeline as lorapipeline
from mlora_operator.api import task as loratask
from mlora_operator.coordinator import Links
from mlora_operator.local.adapt import RunInputs
from mlora_operator.local.audience import Audience
from mlora_operator.local.cluster import LocalCluster, LocalEnvironment
from mlora_operator.local.ending import End, Undecided, endings
from mlora_operator.local.objects import LocalObjects
from mlora_operator.local.ranks import HOST
from mlora_operator.local.run_environment import PageNotServed, RunEnvironment
from mlora_operator.local.timelines import save_timelines
from mlora_operator.page.board import Board
from mlora_operator.page.server import LOOPBACK, PageServer
from mlora_operator.page.service import PageService
from mlora_operator.reconcile.loop import Loop, utc_now


async def run(world: RunInputs, place: RunEnvironment, audience: Audience) -> list[End]:
    """Train every task to its end. All processes have ended when this returns, also by cancellation.

    Raises PageNotServed before anything has begun.
    """
    if place.page is None:
        return await _run(world, place, audience, None)
    board = Board()
    service = PageService(board, lambda: "", utc_now, in_cluster=False)
    page = PageServer(service, HOST, place.page, hosts=LOOPBACK)
    try:
        page.start()
    except OSError as error:
        raise PageNotServed(error.strerror or str(error)) from error
    try:
        return await _run(world, place, audience, board)
    finally:
        await asyncio.to_thread(page.stop)


async def _run(world: RunInputs, place: RunEnvironment, audience: Audience, board: Board | None) -> list[End]:
    objects = LocalObjects(place.state, utc_now)
    for manifest in world.tasks:
        if not objects.resume(manifest):
            objects.apply(manifest)
    for manifest in world.pipelines:
        objects.apply(manifest)

    changed = asyncio.Event()

    def task_changed(task: dict[str, Any]) -> None:
        audience.task_changed(task)
        changed.set()

    private = Path(tempfile.mkdtemp(prefix="mlora-"))  # readable by this user alone
    cluster = LocalCluster(
        world,
        objects,
        LocalEnvironment(
            state=place.state,
            private=private,
            cache=place.cache,
            environment=place.environment,
            machine=place.machine,
            command=place.command,
        ),
        on_task=task_changed,
        on_event=audience.happened,
    )
    try:
        for task in objects.of_kind(loratask.KIND):
            audience.task_changed(task)
        ends = await _reconcile(cluster, objects, world, changed, board)
        if place.timeline is not None:
            await save_timelines(place.timeline, cluster.endpoints())
        return ends
    finally:
        try:
            await asyncio.shield(cluster.stop())
        finally:
            shutil.rmtree(private, ignore_errors=True)


async def _reconcile(
    cluster: LocalCluster,
    objects: LocalObjects,
    world: RunInputs,
    changed: asyncio.Event,
    board: Board | None,
) -> list[End]:
    loop: Loop | None = None

    def wake() -> None:
        if loop is not None:
            loop.wake()
        changed.set()

    async with Links(wake, utc_now) as links:
        watchers = (board.watcher(links),) if board is not None else ()
        loop = Loop(cluster, links, world.settings, watchers=watchers)
        cluster.wake = wake
        running = asyncio.create_task(loop.run(), name="reconcile loop")
        undecided = Undecided()
        try:
            while True:
                given_up = {str(key): why for key, why in cluster.given_up.items()}
                tasks, now = objects.of_kind(loratask.KIND), time.monotonic()
                lasting = undecided.lasting((*tasks, *objects.of_kind(lorapipeline.KIND)), now)
                ended = endings(tasks, given_up, lasting)
                if ended is not None:
                    return ended
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(undecided.due(now)):
                        await changed.wait()
                changed.clear()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
