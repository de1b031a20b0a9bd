"""Who may hold a connection to the coordinator's port. Its event loop is the only one that calls in here.

1. Whoever calls has ``PATIENCE`` seconds to end the handshake and to send a request with the token, whatever arrives
   meanwhile; then the connection is cut off. One that has is left alone from then on.
2. When ``MOST`` have proven nothing yet, the newest gets the place of the address that holds most of them, its oldest: who
   has one address pushes out only its own, however many they are, and never one that has proven itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

PATIENCE = 10.0  # seconds
MOST = 64  # connections that have proven nothing yet


@dataclass(slots=True)
class _Caller:
    transport: asyncio.Transport  # below TLS
    socket: object  # the same object for all transports of a connection
    address: str


class Gate:
    def __init__(self, patience: float = PATIENCE, most: int = MOST) -> None:
        self.patience = patience
        self._most = most
        self._callers: dict[int, _Caller] = {}  # by the identity of its socket; the oldest first

    def enter(self, transport: asyncio.Transport) -> None:
        """A connection that was just taken."""
        self._callers = {key: one for key, one in self._callers.items() if not one.transport.is_closing()}
        if len(self._callers) >= self._most:
            held = Counter(one.address for one in self._callers.values())
            most = max(held.values())
            self._cut_off(next(key for key, one in self._callers.items() if held[one.address] == most))
        sock, peer = transport.get_extra_info("socket"), transport.get_extra_info("peername")
        caller = _Caller(transport, sock, str(peer[0]) if peer else "")
        self._callers[id(sock)] = caller
        asyncio.get_running_loop().call_later(self.patience, self._late, caller)

    def proven(self, transport: asyncio.BaseTransport | None) -> None:
        """A request with the token came over it."""
        if transport is not None:
            self._callers.pop(id(transport.get_extra_info("socket")), None)

    def _late(self, caller: _Caller) -> None:
        if self._callers.get(id(caller.socket)) is caller:
            self._cut_off(id(caller.socket))

    def _cut_off(self, key: int) -> None:
        self._callers.pop(key).transport.abort()


class Guarded(asyncio.Protocol):
    """Stands before ``make()``, the protocol of a server, and hands the connection over to it, behind the handshake if
    there is ``tls``."""

    def __init__(self, gate: Gate, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None) -> None:
        self._gate, self._make, self._tls = gate, make, tls
        self._handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._gate.enter(transport)
        if self._tls is None:
            inner = self._make()
            transport.set_protocol(inner)
            inner.connection_made(transport)
            return
        transport.pause_reading()  # what comes is for TLS
        self._handshake = asyncio.ensure_future(self._shake_hands(transport, self._tls))

    async def _shake_hands(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        inner = self._make()
        with contextlib.suppress(OSError):  # of the caller: it speaks no TLS, has gone, or was cut off
            secured = await asyncio.get_running_loop().start_tls(
                transport, inner, tls, server_side=True, ssl_handshake_timeout=self._gate.patience
            )
            if secured is not None:
                inner.connection_made(secured)
                return
        transport.abort()
