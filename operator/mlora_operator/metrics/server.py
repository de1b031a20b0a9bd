"""``GET /metrics`` on a port of its own, so that a network policy can let scrapes in and nothing else."""

from __future__ import annotations

import asyncio

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


async def serve_metrics(port: int, registry: CollectorRegistry) -> web.AppRunner:
    """Serve on all addresses until the runner is cleaned up. Text is made in another thread, one at a time: neither a
    slow client nor many of them hold the reconcile loop up."""
    turn = asyncio.Lock()

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        async with turn:
            text = await asyncio.to_thread(encode, registry)
        return web.Response(body=text, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    app = web.Application(client_max_size=1)
    app.add_routes([web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host=None, port=port).start()
    return runner
