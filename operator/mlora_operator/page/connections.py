"""How many connections a server takes, and for how long: so that slow or many clients cost a known amount."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one server."""

    connections: int = 64  # at once; one more is closed at once
    seconds: float = 60.0  # after which a connection is closed behind the answer that is on its way ...
    grace: float = 15.0  # ... and so much later whatever is on its way
    idle: float = 15.0  # seconds between two requests


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def bounded(server: web.Server, limits: Limits) -> Callable[[], asyncio.BaseProtocol]:
    """A protocol factory for ``loop.create_server`` that keeps the limits. aiohttp has none for a client that sends its
    request byte by byte, or reads its answer so.
    """
    loop = asyncio.get_running_loop()

    def connect() -> asyncio.BaseProtocol:
        if len(server.connections) >= limits.connections:
            return _Refused()
        handler = server()
        loop.call_later(limits.seconds, handler.close)
        loop.call_later(limits.seconds + limits.grace, handler.force_close)
        return handler

    return connect
