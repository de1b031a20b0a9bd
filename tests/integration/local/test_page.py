"""``mlora run --page``: a run in a browser, from this machine alone."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from mlora_operator.local.run_environment import PageNotServed

from .test_run import Bench, bench, world  # noqa: F401

pytestmark = pytest.mark.integration


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until(ask: Callable[[], Any], true: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(40):
        while True:
            found = await ask()
            if found is not None and true(found):
                return found
            await asyncio.sleep(0.1)


async def test_the_page_shows_the_run_from_queue_to_adapter_and_goes_with_it(bench: Bench) -> None:  # noqa: F811
    bench.script(step_seconds=0.15)
    port = free_port()
    running = asyncio.create_task(bench.run(world("a", "b", steps=20, stages=2), page=port))
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

        async def ask(path: str) -> Any:
            try:
                async with session.get(f"/api/v1/{path}") as answer:
                    return json.loads(await answer.text()) if answer.status == 200 else None
            except aiohttp.ClientError:
                return None

        trained = await until(
            lambda: ask("tasks?list=training"),
            lambda found: any(one.get("step", 0) > 3 for one in found["tasks"]),
        )
        assert {one["name"] for one in trained["tasks"]} <= {"a", "b"}
        curves = await until(
            lambda: ask("losses"), lambda found: found["curves"] and len(found["curves"][0]["steps"]) > 3
        )
        steps, losses = curves["curves"][0]["steps"], curves["curves"][0]["losses"]
        assert losses == [pytest.approx(2.0 / step, rel=1e-4) for step in steps]
        overview = await ask("overview")
        (pipeline,) = overview["pipelines"]
        assert (pipeline["coordinator"], len(pipeline["stages"])) == ("answers", 2)
        timeline = await ask(f"timeline?pipeline={pipeline['namespace']}/{pipeline['name']}")
        assert timeline["spans"]
        async with session.get("/api/v1/overview", headers={"Host": "evil.example"}) as answer:
            assert answer.status == 400
        await running
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_port_that_is_taken_is_told_before_anything_begins(bench: Bench) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PageNotServed):
        await bench.run(world("a"), page=taken.getsockname()[1])
    assert bench.noted("pids") == []
