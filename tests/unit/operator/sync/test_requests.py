"""Requests to a server that is slow, large, absent, or sends elsewhere."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from mlora_operator.sync.requests import LARGEST_ANSWER, TRIES, ServerConnection, ServerRefused, ServerSilent
from tests.fixtures.hostile_server import hostile
from tests.fixtures.model_server import FakeModelServer, model_server


@pytest.fixture
def server() -> Iterator[FakeModelServer]:
    with model_server() as made:
        yield made


def connection(url: str, key: str | None = None, pauses: list[float] | None = None) -> ServerConnection:
    return ServerConnection(url, key, (pauses if pauses is not None else []).append)


def test_what_passes_is_tried_again_a_number_of_times(server: FakeModelServer) -> None:
    pauses: list[float] = []
    server.fails = [(503, b"starting")] * (TRIES - 1)
    assert connection(server.url, pauses=pauses).get("/v1/models", 5)["object"] == "list"
    assert pauses == [1, 2, 4]
    server.fails = [(503, b"starting")] * TRIES
    with pytest.raises(ServerSilent, match="/v1/models answered 503: starting"):
        connection(server.url).get("/v1/models", 5)
    assert not server.fails


def test_a_refusal_is_not_tried_again(server: FakeModelServer) -> None:
    server.fails = [(400, b'{"error": {"message": "rank 48 is too high"}}')]
    with pytest.raises(ServerRefused, match=r"/v1/models answered 400: rank 48 is too high$") as refused:
        connection(server.url).get("/v1/models", 5)
    assert refused.value.status == 400
    assert len(server.asked) == 1


def test_the_words_of_an_error_have_an_end(server: FakeModelServer) -> None:
    server.fails = [(500, b"x" * 100_000)]
    with pytest.raises(ServerRefused) as refused:
        connection(server.url).get("/v1/models", 5)
    assert len(str(refused.value)) < 700


def test_a_key_is_not_carried_elsewhere(server: FakeModelServer) -> None:
    server.key = "secret"
    assert connection(server.url, "secret").get("/v1/models", 5)["object"] == "list"
    with pytest.raises(ServerRefused, match="answered 401: Unauthorized"):
        connection(server.url).get("/v1/models", 5)
    server.key, server.fails = None, [(307, b"")]
    with pytest.raises(ServerRefused, match="answered 307"):
        connection(server.url, "secret").get("/v1/models", 5)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ServerSilent, match=rf"{url} does not answer: .*refused"):
        connection(url).get("/v1/models", 5)


def test_a_proxy_of_the_environment_is_not_asked(
    server: FakeModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert connection(server.url).get("/v1/models", 5)["object"] == "list"


def test_an_answer_without_end_is_left_off() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"

    def endless(_: object) -> Iterator[bytes]:
        yield head
        while True:
            yield b"[" * 65536

    with hostile(endless) as server, pytest.raises(ServerRefused, match="more than 16,777,216 bytes"):
        connection(server.url).get("/v1/models", 30)
    assert LARGEST_ANSWER <= server.sent < 2 * LARGEST_ANSWER + 2**24


def test_an_answer_that_drips_is_left_off() -> None:
    def dripping(_: object) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
        while True:
            yield b" "

    times = iter(range(0, 100_000, 10))
    with hostile(dripping) as server:
        asked = ServerConnection(server.url, pause=lambda _: None, now=lambda: float(next(times)))
        with pytest.raises(ServerSilent, match="takes too long"):
            asked.get("/v1/models", 30)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 two hundred\r\n\r\n", b"\x16\x03\x01"])
def test_what_is_no_http_is_no_answer(answer: bytes) -> None:
    with hostile(lambda _: [answer]) as server, pytest.raises(ServerSilent, match="does not answer"):
        connection(server.url).get("/v1/models", 5)
