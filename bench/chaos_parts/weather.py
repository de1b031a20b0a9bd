"""A proxy in front of a real object store, whose weather can be bad.

In bad weather each request may be refused (500, 403), delayed, or broken: before the store has it, after the store has done
it but before the answer, or in the middle of the answer. All chance comes from one ``Random``. In any weather the proxy
knows what the store did, and can call somebody at the very moment of a request: before it is forwarded, or after the store
has done it and before anybody knows.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Literal
from urllib.parse import unquote, urlsplit

Kind = Literal["500", "403", "slow", "reset"]
_UNFORWARDED = {"expect", "connection", "keep-alive", "transfer-encoding"}
_REFUSALS = {
    "500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "403": (403, "AccessDenied", "Access Denied."),
}


@dataclass(frozen=True, slots=True)
class Deed:
    """A request that the store has done. ``key``: bucket and key."""

    at: float  # time.monotonic
    method: str
    key: str
    sha256: str = ""  # of what was written


@dataclass(frozen=True, slots=True)
class Moment:
    """A request to wait for: its method, and a pattern that its bucket and key match. ``done``: after the store has done
    it, else before."""

    name: str
    method: str
    pattern: str
    done: bool = False


class Weather:
    """Listens on a free port from ``__init__`` on; thread-safe."""

    def __init__(self, upstream: str, random: Random, remembered: str, host: str = "127.0.0.1") -> None:
        """``remembered``: pattern of the keys whose writes are kept in ``deeds``. ``host``: the address to listen on."""
        self._upstream = urlsplit(upstream).netloc
        self._random = random
        self._remembered = re.compile(remembered)
        self._lock = threading.Lock()
        self._kind: Kind | None = None
        self._share = 1.0
        self._waits: list[tuple[Moment, Callable[[], None]]] = []
        self.deeds: list[Deed] = []
        self.requests = 0
        self.spoilt = 0  # requests that bad weather met
        weather = self

        class Handler(_Handler):
            proxy = weather

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="weather", daemon=True).start()

    @property
    def upstream(self) -> str:
        return self._upstream

    def turn(self, kind: Kind | None, share: float = 1.0) -> None:
        """From now on ``share`` of the requests meet bad weather of ``kind``; None: fine weather."""
        with self._lock:
            self._kind, self._share = kind, share

    def when(self, moment: Moment, call: Callable[[], None]) -> None:
        """Call once, in the thread that holds the next such request up."""
        with self._lock:
            self._waits.append((moment, call))

    def forget_waits(self) -> None:
        with self._lock:
            self._waits.clear()

    def strike(self) -> tuple[Kind | None, float]:
        """What the next request meets, with a number from 0 to 1 that says how."""
        with self._lock:
            self.requests += 1
            if self._kind is None or self._random.random() >= self._share:
                return None, 0.0
            self.spoilt += 1
            return self._kind, self._random.random()

    def note(self, method: str, key: str, body: bytes) -> None:
        if method in ("PUT", "DELETE") and self._remembered.search(key):
            with self._lock:
                self.deeds.append(Deed(time.monotonic(), method, key, hashlib.sha256(body).hexdigest()))

    def meet(self, method: str, key: str, done: bool) -> None:
        """Calls whoever waits for this request."""
        with self._lock:
            found = [one for one in self._waits if _is_it(one[0], method, key, done)]
            self._waits = [one for one in self._waits if one not in found]
        for _, call in found:
            call()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _is_it(moment: Moment, method: str, key: str, done: bool) -> bool:
    return moment.method == method and moment.done == done and re.search(moment.pattern, key) is not None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Weather

    def do_GET(self) -> None:
        self._pass_on()

    do_HEAD = do_PUT = do_DELETE = do_POST = do_GET

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = unquote(urlsplit(self.path).path).lstrip("/")
        self.proxy.meet(self.command, key, done=False)
        kind, how = self.proxy.strike()
        if kind in _REFUSALS:
            self._refuse(*_REFUSALS[kind])
            return
        if kind == "slow":
            time.sleep(0.3 + 2 * how)
        if kind == "reset" and how < 1 / 3:
            self._break()
            return
        status, headers, answer = self._ask(body)
        if status < 300:
            self.proxy.note(self.command, key, body)
            self.proxy.meet(self.command, key, done=True)
        if kind == "reset" and (how < 2 / 3 or not answer):
            self._break()
            return
        self._answer(status, headers, answer, broken=kind == "reset")

    def _ask(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        connection = http.client.HTTPConnection(self.proxy.upstream, timeout=60)
        try:
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in _UNFORWARDED
            }
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        except OSError:  # the store itself is gone, as at the benchmark's end
            return 503, {}, b""
        finally:
            connection.close()

    def _answer(self, status: int, headers: Mapping[str, str], answer: bytes, broken: bool) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in (*_UNFORWARDED, "content-length"):
                self.send_header(name, value)
        # The answer to HEAD says how long a body would be.
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(answer))
        self.send_header("Content-Length", length)
        try:
            self.end_headers()
            if broken:
                self.wfile.write(answer[: len(answer) // 2])
                self._break()
            elif self.command != "HEAD":
                self.wfile.write(answer)
        except OSError:  # who asked was killed
            self.close_connection = True

    def _refuse(self, status: int, code: str, message: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        self._answer(status, {"Content-Type": "application/xml"}, text.encode(), broken=False)

    def _break(self) -> None:
        """RST instead of an answer."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ValueError):  # a client that was killed, or a connection that was broken above
            self.close_connection = True

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, format: str, *arguments: object) -> None:
        pass
