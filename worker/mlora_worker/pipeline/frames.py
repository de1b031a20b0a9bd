"""Messages on a socket between ranks: a JSON header and a binary payload, each with its length in front.

Never pickle: a header that does not parse, or lengths beyond the limits, end the connection.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol

_LENGTHS = struct.Struct("!IQ")
_MAX_HEADER = 64 * 2**20
_MAX_PAYLOAD = 64 * 2**30

Header = dict[str, Any]
Payload = bytes | memoryview
MakeBuffer = Callable[[int], memoryview]


class LinkClosed(ConnectionError):
    """The peer closed the connection, died, or spoke another language."""


class Connection(Protocol):
    """A socket, or a ``Channel`` over one."""

    def sendall(self, data: bytes | memoryview, /) -> None: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...


def plain_buffer(size: int) -> memoryview:
    return memoryview(bytearray(size))


def send_frame(sock: Connection, header: Header, payload: Payload = b"") -> int:
    """Send one message whole; returns the bytes that went out. Raises ``LinkClosed``."""
    head = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    prefix = _LENGTHS.pack(len(head), len(payload)) + head
    try:
        sock.sendall(prefix)
        if len(payload):
            sock.sendall(payload)
    except OSError as error:
        raise LinkClosed(f"the link to a peer broke while sending: {error}") from error
    return len(prefix) + len(payload)


def receive_frame(
    sock: Connection,
    max_header: int = _MAX_HEADER,
    max_payload: int = _MAX_PAYLOAD,
    buffer: MakeBuffer = plain_buffer,
) -> tuple[Header, memoryview]:
    """Block until one message is here whole. ``buffer``: gives the memory that the payload is received into. Raises
    ``LinkClosed``, and what ``buffer`` raises."""
    head_length, payload_length = _LENGTHS.unpack(_receive_exactly(sock, _LENGTHS.size, plain_buffer))
    if head_length > max_header or payload_length > max_payload:
        raise LinkClosed("a peer announced a message beyond the limits")
    try:
        header = json.loads(bytes(_receive_exactly(sock, head_length, plain_buffer)))
    except (ValueError, RecursionError) as error:
        raise LinkClosed(f"a peer sent a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise LinkClosed("a peer sent a header that is not a JSON object")
    return header, _receive_exactly(sock, payload_length, buffer)


def _receive_exactly(sock: Connection, length: int, buffer: MakeBuffer) -> memoryview:
    whole = buffer(length)
    view = whole
    while view:
        try:
            count = sock.recv_into(view)
        except OSError as error:
            raise LinkClosed(f"the link to a peer broke while receiving: {error}") from error
        if not count:
            raise LinkClosed("the peer closed the link")
        view = view[count:]
    return whole


def keep_alive(sock: socket.socket) -> None:
    """Notice within about half a minute that the peer's node is gone, and never delay a small message."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", 30_000),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
