"""The page and its API over HTTP, from a thread of its own: whoever asks, the reconcile loop does not wait.

Only GET and HEAD. Every answer has an ETag, so that a page that looks again and again costs a few bytes while nothing
changes; answers are made once for each pass (``service``), connections are few and short (``connections``).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from importlib import resources
from ipaddress import ip_address
from pathlib import PurePosixPath
from typing import Literal

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from mlora_operator.coordinator import CoordinatorError, open_session
from mlora_operator.page.connections import Limits, bounded
from mlora_operator.page.documents import Trouble
from mlora_operator.page.service import (
    PageAnswer,
    PageService,
    RequestError,
    answer,
    asked,
    tagged,
    unreachable,
)
from mlora_operator.page.timelines import Timelines

logger = logging.getLogger(__name__)

STOP_WITHIN = 5.0  # seconds
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, and asked about each time
}


def page_app(
    service: PageService, timelines: Callable[[], Timelines], hosts: frozenset[str] | None
) -> web.Application:
    """The routes. ``hosts``: names under which it may be asked for; None: any."""

    def api(
        ask: Callable[[Mapping[str, str]], PageAnswer], *names: str
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            return _respond(request, ask(asked(request.query, "namespace", *names)), "application/json")

        return handle

    async def timeline(request: web.Request) -> web.Response:
        query = asked(request.query, "namespace", "pipeline")
        key, endpoint, stages = service.coordinator(query)
        try:
            found = await timelines().of(key, endpoint, stages)
        except CoordinatorError:
            raise unreachable(key) from None
        return _respond(request, service.timeline(key, found, query), "application/json")

    app = web.Application(middlewares=[_guard(hosts)], client_max_size=1024)
    for name, kind in _files():
        app.router.add_get("/" if name == "index.html" else f"/{name}", _file(name, kind))
    app.router.add_get("/favicon.ico", _nothing)
    app.router.add_get("/api/v1/overview", api(service.overview))
    app.router.add_get("/api/v1/tasks", api(service.tasks, "list", "state", "search", "offset", "limit"))
    app.router.add_get("/api/v1/task", api(service.task, "task"))
    app.router.add_get("/api/v1/losses", api(service.losses, "state", "search", "uids", "limit"))
    app.router.add_get("/api/v1/namespaces", api(service.namespaces, "offset", "limit"))
    app.router.add_get("/api/v1/timeline", timeline)
    return app


class PageServer:
    """``start`` returns once the port is bound. ``host`` None: all addresses."""

    def __init__(
        self,
        service: PageService,
        host: str | None,
        port: int,
        *,
        hosts: frozenset[str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._desk = service
        self._host = host
        self._port = port
        self._hosts = hosts
        self._limits = limits or Limits()
        self._bound: Future[int] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)

    def start(self) -> int:
        """The port. Raises OSError when it cannot be bound."""
        self._thread.start()
        return self._bound.result()

    def stop(self) -> None:
        """Idempotent. An answer that is on its way may be cut off."""
        if self._loop is None or self._stopped is None or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(STOP_WITHIN)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._bound.done():
                self._bound.set_exception(error)
            else:
                logger.exception("the page's server has stopped")

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        async with open_session() as session:
            timelines = Timelines(session)
            runner = web.AppRunner(
                page_app(self._desk, lambda: timelines, self._hosts),
                access_log=None,
                keepalive_timeout=self._limits.idle,
                shutdown_timeout=1.0,
            )
            await runner.setup()
            assert runner.server is not None
            try:
                server = await self._loop.create_server(
                    bounded(runner.server, self._limits), self._host, self._port, backlog=64
                )
                self._bound.set_result(server.sockets[0].getsockname()[1])
                await self._stopped.wait()
                server.close()
            finally:
                await runner.cleanup()


def _guard(hosts: frozenset[str] | None) -> Middleware:
    """What is true of every answer, errors among them."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await _handled(request, handler, hosts)
        response.headers.update(_HEADERS)
        return response

    return guard


async def _handled(
    request: web.Request, handler: Handler, hosts: frozenset[str] | None
) -> web.StreamResponse:
    if request.method not in ("GET", "HEAD"):
        refused = _trouble(405, "methodNotAllowed", "only GET and HEAD are allowed")
        refused.headers["Allow"] = "GET, HEAD"
        return refused
    # A page of somebody else's that calls its own name by this machine's address must not read this one. An address is
    # nobody's name: a browser that says one has asked for it.
    named = request.headers.getall("Host", [])
    if hosts is not None and (len(named) != 1 or not _is_served(_name_of(named[0]), hosts)):
        return _trouble(
            400, "badRequest", "the page is not served under this host name: add it to page.hosts"
        )
    try:
        return await handler(request)
    except RequestError as refused:
        return _refuse(refused.status, refused.trouble)
    except web.HTTPNotFound:
        return _trouble(404, "notFound", "this page does not exist")
    except web.HTTPException as error:
        return _trouble(error.status, "badRequest", error.reason)
    except Exception:
        logger.exception("the page could not answer %s", request.path)
        return _trouble(500, "internal", "see the operator's log")


def _is_served(name: str, hosts: frozenset[str]) -> bool:
    if name in hosts:
        return True
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _name_of(host: str) -> str:
    """Of a Host header, without the port."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.lower().removesuffix(".")


def _trouble(
    status: int, error: Literal["methodNotAllowed", "badRequest", "notFound", "internal"], message: str
) -> web.Response:
    return _refuse(status, Trouble(error=error, message=message))


def _refuse(status: int, trouble: Trouble) -> web.Response:
    response = web.Response(status=status, body=answer(trouble).body, content_type="application/json")
    if status == 503:
        response.headers["Retry-After"] = "1"
        response.force_close()  # behind a Service, the next connection may lead to the replica that leads
    return response


def _respond(request: web.Request, found: PageAnswer, kind: str) -> web.Response:
    asked = request.headers.get("If-None-Match", "")
    if asked == "*" or found.etag in (one.strip().removeprefix("W/") for one in asked.split(",")):
        return web.Response(status=304, headers={"ETag": found.etag})
    return web.Response(body=found.body, content_type=kind, charset="utf-8", headers={"ETag": found.etag})


def _files() -> Iterator[tuple[str, str]]:
    """What is in ``files``, by name, and of which kind."""
    for one in resources.files("mlora_operator.page").joinpath("files").iterdir():
        kind = _KINDS.get(PurePosixPath(one.name).suffix)
        if kind is not None:
            yield one.name, kind


def _file(name: str, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    found = tagged(resources.files("mlora_operator.page").joinpath("files", name).read_bytes())

    async def handle(request: web.Request) -> web.Response:
        return _respond(request, found, kind)

    return handle


async def _nothing(_: web.Request) -> web.Response:
    """Browsers ask for an icon."""
    return web.Response(status=204)
