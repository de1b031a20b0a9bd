"""The proxy before the store: what bad weather does, and when somebody is called."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

import pytest

from bench.chaos_parts.weather import Moment, Weather

KEY = "/adapters/chaos/one/manifest.json"


class Store:
    """Keeps what is PUT to it, and answers with what it was asked."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                store.held[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(200, b"")

            def do_GET(self) -> None:
                found = store.held.get(self.path)
                self._answer(200 if found is not None else 404, found or b"")

            def do_HEAD(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(store.held[self.path])))
                self.end_headers()

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"tag"')
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def weather(store: Store) -> Iterator[Weather]:
    made = Weather(f"http://127.0.0.1:{store.server.server_address[1]}", Random(1), r"manifest\.json$")
    yield made
    made.close()


def ask(
    weather: Weather, method: str, path: str = KEY, body: bytes | None = None
) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection(weather.endpoint.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.getheader("ETag")
    finally:
        connection.close()


def test_in_fine_weather_all_goes_through_and_writes_are_remembered(weather: Weather) -> None:
    assert ask(weather, "PUT", body=b"content")[0] == 200
    assert ask(weather, "PUT", "/adapters/chaos/one/README.md", b"card")[0] == 200
    assert ask(weather, "GET") == (200, b"content", '"tag"')
    assert ask(weather, "HEAD")[0] == 200
    assert [(deed.method, deed.key) for deed in weather.deeds] == [("PUT", KEY.lstrip("/"))]
    assert (weather.requests, weather.spoilt) == (4, 0)


@pytest.mark.parametrize(("kind", "status"), [("500", 500), ("403", 403)])
def test_a_refusal_does_not_reach_the_store(weather: Weather, store: Store, kind: str, status: int) -> None:
    weather.turn("500" if kind == "500" else "403")
    assert ask(weather, "PUT", body=b"content")[0] == status
    assert not store.held
    assert not weather.deeds
    weather.turn(None)
    assert ask(weather, "PUT", body=b"content")[0] == 200


def test_a_reset_breaks_requests_before_and_after_the_store_has_them(weather: Weather, store: Store) -> None:
    weather.turn("reset")
    done = []
    for number in range(12):
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(weather, "PUT", f"/adapters/{number}", b"content")
        done.append(f"/adapters/{number}" in store.held)
    assert any(done)
    assert not all(done)


def test_a_share_of_the_requests_meets_bad_weather(weather: Weather) -> None:
    weather.turn("500", 0.5)
    answers = [ask(weather, "PUT", body=b"content")[0] for _ in range(40)]
    assert 8 < answers.count(500) < 32


@pytest.mark.parametrize("done", [False, True])
def test_somebody_is_called_once_at_the_very_moment(weather: Weather, store: Store, done: bool) -> None:
    held: list[bool] = []
    weather.when(Moment("manifest", "PUT", r"manifest\.json$", done), lambda: held.append(bool(store.held)))
    ask(weather, "GET")
    assert held == []
    ask(weather, "PUT", body=b"content")
    ask(weather, "PUT", body=b"content")
    assert held == [done]


def test_a_moment_that_is_forgotten_never_comes(weather: Weather) -> None:
    called: list[int] = []
    weather.when(Moment("manifest", "PUT", "manifest"), lambda: called.append(1))
    weather.forget_waits()
    ask(weather, "PUT", body=b"content")
    assert called == []
