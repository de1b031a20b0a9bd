"""Whoever calls at the coordinator's port and proves nothing keeps nobody out, and does not stay."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from mlora_worker.coordinator.http.server import GATE, coordinator_app, serve_in_thread
from mlora_worker.coordinator.service import Coordinator
from tests.unit.worker.pipeline.links import pair, put

PATIENCE = 0.5
AT_LAST = 5.0  # seconds, on a machine with little to spare
MOST = 8


class Port:
    def __init__(self, tls: ssl.SSLContext | None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.number = free.getsockname()[1]
        app = coordinator_app(lambda: cast(Coordinator, None), lambda: "t")
        app[GATE].__init__(PATIENCE, MOST)  # type: ignore[misc]
        self._tls = tls is not None
        serve_in_thread(app, "127.0.0.1", self.number, tls)

    def knock(self, address: str = "127.0.0.2") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.number), 5, (address, 0))

    def client(self) -> http.client.HTTPConnection:
        if not self._tls:
            return http.client.HTTPConnection("127.0.0.1", self.number, timeout=5)
        trust = ssl.create_default_context()
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection("127.0.0.1", self.number, timeout=5, context=trust)


def ask(client: http.client.HTTPConnection, token: str = "t") -> int:
    client.request("GET", "/v1/report", headers={"Authorization": f"Bearer {token}"})
    answer = client.getresponse()
    answer.read()
    return answer.status


def hung_up(sock: socket.socket, within: float) -> bool:
    sock.settimeout(within)
    try:
        return sock.recv(1000) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.fixture(params=["plain", "tls"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Port:
    if request.param == "plain":
        return Port(None)
    folder = put(tmp_path / "tls", pair())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return Port(context)


def test_who_says_nothing_is_cut_off(port: Port) -> None:
    with port.knock() as sock:
        assert not hung_up(sock, PATIENCE / 3)
        assert hung_up(sock, AT_LAST)


def test_a_byte_now_and_then_is_no_reason_to_wait(port: Port) -> None:
    with port.knock() as sock:
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begun < 2 * AT_LAST:
                sock.sendall(b"G")
                time.sleep(0.1)
        assert time.monotonic() - begun < AT_LAST


def test_who_has_the_token_keeps_the_connection(port: Port) -> None:
    client = port.client()
    assert ask(client) == 503
    held = client.sock
    time.sleep(1.5 * PATIENCE)
    assert ask(client) == 503
    assert client.sock is held


def test_who_has_a_wrong_token_does_not(port: Port) -> None:
    client = port.client()
    assert ask(client, "wrong") == 401
    assert hung_up(client.sock, AT_LAST)


@pytest.mark.parametrize("count", [10 * MOST])
def test_a_crowd_that_says_nothing_keeps_nobody_out(port: Port, count: int) -> None:
    client = port.client()
    assert ask(client) == 503
    with contextlib.ExitStack() as stack:
        done = threading.Event()
        stack.callback(done.set)
        held = [stack.enter_context(port.knock()) for _ in range(count)]
        assert ask(client) == 503, "one that has proven itself has no place to lose"
        assert ask(port.client()) == 503
        alive = sum(not hung_up(sock, 0.01) for sock in held)
        assert alive <= MOST


def test_who_has_one_address_pushes_out_only_its_own() -> None:
    port = Port(None)
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(port.knock("127.0.0.9"))
        time.sleep(0.05)
        for _ in range(3 * MOST):
            stack.enter_context(port.knock())
        assert not hung_up(other, 0.2)
