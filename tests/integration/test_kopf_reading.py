"""The memory that objects of others cost the operator."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from mlora_operator.api import API_VERSION

pytestmark = pytest.mark.integration

MANY = 48
PATH = f"/apis/{API_VERSION}/loratasks"


def large(number: int) -> dict[str, Any]:
    """What `edit` in one namespace may store: Kubernetes bounds annotations, and neither all labels nor all finalizers."""
    labels = {f"k{one:04d}.{'a' * 200}/{'b' * 57}{one:05d}": "v" * 63 for one in range(3200)}
    meta = {
        "name": f"t{number}",
        "namespace": "evil",
        "uid": f"u{number:03d}",
        "resourceVersion": "7",
        "generation": 1,
        "creationTimestamp": "2026-11-29T12:00:00Z",
        "labels": labels,
        "annotations": {"x": "y" * 250_000, "mlora.dev/retry": "again"},
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "LoRATask",
        "metadata": meta,
        "spec": {"baseModel": f"m{number}"},
    }


@asynccontextmanager
async def api_server(objects: list[dict[str, Any]], later: list[dict[str, Any]]) -> AsyncIterator[str]:
    """The URL of one that has these objects; those of ``later`` come as events."""
    texts = [json.dumps(one) for one in objects]

    async def tasks(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            for one in later:
                await response.write(json.dumps({"type": "ADDED", "object": one}).encode() + b"\n")
            await asyncio.Event().wait()
        begin = int(request.query.get("continue", 0))
        end = min(begin + int(request.query.get("limit", len(texts))), len(texts))
        meta = {"resourceVersion": "9", "continue": str(end) if end < len(texts) else ""}
        head = json.dumps({"apiVersion": API_VERSION, "kind": "LoRATaskList", "metadata": meta})
        text = f'{head[:-1]}, "items": [{",".join(texts[begin:end])}]}}'
        return web.Response(text=text, content_type="application/json")

    app = web.Application()
    app.add_routes([web.get(PATH, tasks)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("listed", [MANY, 0], ids=["listed", "watched"])
async def test_objects_of_the_largest_size_cost_less_memory_than_they_have_bytes(listed: int) -> None:
    objects = [large(number) for number in range(MANY)]
    size = len(json.dumps(objects))
    assert size > 50 * 10**6
    async with api_server(objects[:listed], objects[listed:]) as url:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.fixtures.lister", url, str(MANY), stdout=asyncio.subprocess.PIPE
        )
        answer, _ = await process.communicate()
    found = json.loads(answer)
    assert found["objects"] == MANY
    assert found["held"] < 400 * MANY  # bytes
    assert found["peak"] - found["before"] < size / 2
