"""The coordinator over HTTP or HTTPS (``protocol.py`` says what). One thread with its own event loop; handlers are thin."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ssl
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from aiohttp import web
from pydantic import ValidationError

from mlora_worker.bounds import MOST_TEXT
from mlora_worker.coordinator.http.gate import Gate, Guarded
from mlora_worker.coordinator.http.plan_parsing import parse_plan, without_values
from mlora_worker.coordinator.service import Coordinator
from mlora_worker.pipeline.collect import Unanswered
from mlora_worker.protocol import REPORT_HEADER
from mlora_worker.stream.timeline import latest

GATE = web.AppKey("GATE", Gate)
_LONGEST_WAIT = 60.0  # seconds a report may be held back
_SETTLE = 0.2  # seconds in which further changes ride along with a report
_LARGEST_PLAN = 256 * 2**20


def coordinator_app(current: Callable[[], Coordinator | None], token: Callable[[], str]) -> web.Application:
    """The routes. ``token`` is read at each request, so that a rotated token takes effect at once; ``current`` is None
    (503) until all stages have loaded the model."""
    gate = Gate()

    def coordinator() -> Coordinator:
        found = current()
        if found is None:
            raise web.HTTPServiceUnavailable(text="the stages are still loading the model")
        return found

    @web.middleware
    async def authorize(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path != "/healthz":
            sent = request.headers.get("Authorization", "")
            # A header may hold bytes that are no text: aiohttp gives them as halves of surrogate pairs.
            if not hmac.compare_digest(sent.encode(errors="surrogateescape"), f"Bearer {token()}".encode()):
                raise web.HTTPUnauthorized(text="the bearer token does not belong to this pipeline")
            gate.proven(request.transport)
        return await handler(request)

    async def put_plan(request: web.Request) -> web.Response:
        try:
            parsed = parse_plan(await request.read())
        except ValidationError as error:
            text = f"the plan is not valid: {without_values(error)}"
            raise web.HTTPUnprocessableEntity(text=text) from None
        plan = parsed.plan
        taken = await asyncio.to_thread(coordinator().set_plan, plan, parsed.unsupported)
        if not taken:
            raise web.HTTPConflict(
                text=f"generation {plan.generation} is in use, or older than the current plan"
            )
        return web.Response(status=204)

    async def put_text(request: web.Request) -> web.Response:
        """One that is not lacking is taken all the same: whoever sent it could not know."""
        digest = request.match_info["digest"]
        if request.content_length is None or request.content_length > MOST_TEXT:
            raise web.HTTPRequestEntityTooLarge(max_size=MOST_TEXT, actual_size=request.content_length or 0)
        body = await request.read()
        if hashlib.sha256(body).hexdigest() != digest:
            raise web.HTTPUnprocessableEntity(text="the text does not match its digest")
        try:
            text = body.decode()
        except UnicodeDecodeError:
            raise web.HTTPUnprocessableEntity(text="the text is not UTF-8") from None
        await asyncio.to_thread(coordinator().take_text, digest, text)
        return web.Response(status=204)

    async def get_report(request: web.Request) -> web.Response:
        try:
            after = int(request.query.get("after", "-1"))
            wait = min(_LONGEST_WAIT, max(0.0, float(request.query.get("wait", "0"))))
        except ValueError:
            raise web.HTTPBadRequest(text="after must be an integer and wait a number of seconds") from None
        known = _format_in(request.headers.get(REPORT_HEADER, ""))
        report = await asyncio.to_thread(coordinator().wait_report, after, wait)
        if wait:
            await asyncio.sleep(_SETTLE)
            report = await asyncio.to_thread(coordinator().wait_report, -1, 0.0)
        return web.Response(text=report.as_understood_by(known).to_json(), content_type="application/json")

    async def get_timeline(request: web.Request) -> web.Response:
        try:
            newest = max(0, int(request.query.get("microbatches", "0")))
        except ValueError:
            raise web.HTTPBadRequest(text="microbatches must be an integer") from None
        try:
            timeline = await asyncio.to_thread(coordinator().timeline, newest)
        except Unanswered as error:
            raise web.HTTPGatewayTimeout(text=str(error)) from None
        if newest:
            timeline = await asyncio.to_thread(latest, timeline, newest)
        return web.Response(text=timeline.to_json(), content_type="application/json")

    app = web.Application(middlewares=[authorize], client_max_size=_LARGEST_PLAN)
    app[GATE] = gate
    app.add_routes(
        [
            web.put("/v1/plan", put_plan),
            web.put("/v1/texts/{digest:[0-9a-f]{64}}", put_text),
            web.get("/v1/report", get_report),
            web.get("/v1/timeline", get_timeline),
            web.get("/healthz", _alive),
        ]
    )
    return app


def health_app() -> web.Application:
    """What ranks other than 0 serve: that the process lives."""
    app = web.Application()
    app.add_routes([web.get("/healthz", _alive)])
    return app


def serve_in_thread(
    app: web.Application, host: str | None, port: int, tls: ssl.SSLContext | None = None
) -> None:
    """Serve until the process ends, HTTPS where there is ``tls``; returns when the port is bound. Raises ``OSError`` when
    it cannot be. Whoever may hold a connection is up to the app's ``GATE``, if it has one."""
    bound: Future[None] = Future()

    async def run() -> None:
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        server, gate = runner.server, app.get(GATE)
        assert server is not None
        try:
            if gate is None:
                await web.TCPSite(runner, host, port, ssl_context=tls).start()
            else:
                loop = asyncio.get_running_loop()
                await loop.create_server(lambda: Guarded(gate, server, tls), host, port, backlog=128)
        except OSError as error:
            bound.set_exception(error)
            return
        bound.set_result(None)
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(run()), name="http", daemon=True).start()
    bound.result()


async def _alive(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


def _format_in(header: str) -> int:
    """Operators that know of the first format alone send no header."""
    try:
        return int(header)
    except ValueError:
        return 1
