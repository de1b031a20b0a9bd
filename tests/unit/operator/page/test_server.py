"""The page over real HTTP: what every answer has, what is refused, and that no client holds another up."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from mlora_operator.page.connections import Limits
from mlora_operator.page.server import LOOPBACK
from tests.fixtures.page_scene import Scene
from tests.fixtures.page_served import Coordinator, Leader, coordinator, endpoints_of, served, utc_now

API = "/api/v1/overview"


@dataclass
class Site:
    address: tuple[str, int]
    small: Coordinator
    leader: Leader
    scene: Scene

    def ask(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=10)
        try:
            connection.request(
                method, path, headers={name.replace("_", "-"): v for name, v in headers.items()}
            )
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    scene, leader = Scene(utc_now(), waiting=30), Leader()
    with coordinator() as small, served(scene.board(endpoints_of(scene, small)), leader) as url:
        yield Site(address_of(url), small, leader, scene)


@pytest.fixture(scope="module")
def own() -> Iterator[Site]:
    """As `mlora run` serves it."""
    scene = Scene(utc_now(), waiting=0)
    with served(scene.board(), hosts=LOOPBACK) as url:
        yield Site(address_of(url), Coordinator(None, []), Leader(), scene)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/page.js",
        "/task.js",
        "/page.css",
        API,
        "/api/v1/task?task=support/tickets-de",
        "/api/v1/namespaces",
        "/api/v1/tasks",
        "/api/v1/losses",
        "/nothing",
        "/api/v1/tasks?limit=x",
    ],
)
def test_every_answer_forbids_what_a_page_could_be_made_to_do(site: Site, path: str) -> None:
    _, headers, _ = site.ask(path)
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/page.js",
        API,
        "/api/v1/tasks?list=finished",
        "/api/v1/losses",
        "/api/v1/task?task=legal/contracts-2026",
    ],
)
def test_who_has_the_answer_already_gets_none(site: Site, path: str) -> None:
    status, headers, body = site.ask(path)
    assert (status, len(body) > 100) == (200, True)
    for tag in (headers["ETag"], f"W/{headers['ETag']}", f'"other", {headers["ETag"]}'):
        again, _, nothing = site.ask(path, If_None_Match=tag)
        assert (again, nothing) == (304, b"")
    assert site.ask(path, If_None_Match='"other"')[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/", API, "/nothing"])
def test_nothing_can_be_written(site: Site, method: str, path: str) -> None:
    status, headers, _ = site.ask(path, method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_head_is_get_without_the_body(site: Site) -> None:
    for path in ("/", API, "/nothing"):
        whole, head = site.ask(path), site.ask(path, "HEAD")
        assert head[0] == whole[0]
        assert head[1]["Content-Length"] == whole[1]["Content-Length"]
        assert head[2] == b""


@pytest.mark.parametrize(
    "path", ["/../handlers.py", "/files/index.html", "/%2e%2e/server.py", "/api/v2/overview"]
)
def test_nothing_but_the_page_is_served(site: Site, path: str) -> None:
    status, _, body = site.ask(path)
    assert status == 404
    assert json.loads(body)["error"] == "notFound"


def test_a_timeline_is_asked_for_once_however_many_look(site: Site) -> None:
    path = "/api/v1/timeline?pipeline=mlora-system/smollm2-135m"
    answers: list[tuple[int, bytes]] = []
    threads = [threading.Thread(target=lambda: answers.append(site.ask(path)[::2])) for _ in range(12)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert {status for status, _ in answers} == {200}
    assert len(json.loads(answers[0][1])["spans"]) > 50
    assert site.small.asked == ["/v1/timeline?microbatches=32"]


def test_a_coordinator_that_does_not_answer_is_told_of_without_its_address(site: Site) -> None:
    status, _, body = site.ask("/api/v1/timeline?pipeline=platform/qwen2.5-7b")
    assert status == 504
    assert json.loads(body) == {
        "version": "v1",
        "error": "unreachable",
        "message": "the coordinator of platform/qwen2.5-7b does not respond",
    }


def test_a_replica_that_follows_closes_the_connection_so_that_the_next_may_find_the_leader() -> None:
    from mlora_operator.page.board import Board

    with served(Board(), Leader("operator-b")) as url:
        site = Site(address_of(url), Coordinator(None, []), Leader(), None)  # type: ignore[arg-type]
        status, headers, body = site.ask(API)
        assert (status, headers["Connection"], headers["Retry-After"]) == (503, "close", "1")
        assert json.loads(body)["leader"] == "operator-b"
        assert site.ask("/")[0] == 200, "the page itself is there, to say so"


@pytest.mark.parametrize(
    "query",
    [
        "?namespace=&namespace=team-a",
        "?namespace=",
        "?namespace=team-a&namespace=team-b",
        "?namespace=team-a&Namespace=",
        "?namespaces=team-a",
        f"?namespace={'a' * 2000}",
        "?" + "namespace=a&" * 300,
    ],
)
@pytest.mark.parametrize("path", ["overview", "tasks", "losses", "timeline"])
def test_what_a_proxy_and_the_page_could_read_in_two_ways_is_refused(
    site: Site, path: str, query: str
) -> None:
    assert site.ask(f"/api/v1/{path}{query}")[0] == 400


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8090", 200),
        ("localhost", 200),
        ("LOCALHOST.:1", 200),
        ("localhost.evil.example", 400),
        ("[::1]:8090", 200),
        ("10.0.0.7:8082", 200),
        ("[fd00::7]", 200),
        ("evil.example:8090", 400),
        ("10.0.0.7.evil.example", 400),
        ("10.0.7", 400),
        ("", 400),
    ],
)
def test_on_a_machine_of_one_s_own_no_other_name_reaches_it(own: Site, host: str, status: int) -> None:
    assert own.ask(API, Host=host)[0] == status


def test_connections_are_bounded_in_number_and_in_time_and_come_free_again() -> None:
    scene = Scene(utc_now(), waiting=0)
    limits = Limits(connections=4, seconds=0.6, grace=0.2, idle=5.0)
    with served(scene.board(), limits=limits) as url, ExitStack() as stack:
        address = address_of(url)
        site = Site(address, Coordinator(None, []), Leader(), scene)  # type: ignore[arg-type]
        slow = [stack.enter_context(socket.create_connection(address, 5)) for _ in range(4)]
        for one in slow:
            one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")  # and never ends
        time.sleep(0.2)
        with pytest.raises((OSError, http.client.HTTPException)):
            site.ask(API)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                if site.ask(API)[0] == 200:
                    break
            except (OSError, http.client.HTTPException):
                time.sleep(0.1)
        else:
            pytest.fail("the slow clients were not let go")
        for one in slow:
            one.settimeout(5)
            assert one.recv(1) == b"", "closed from the other side"


def test_clients_that_read_nothing_do_not_keep_others_waiting(site: Site) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            lazy = stack.enter_context(socket.create_connection(site.address, 5))
            lazy.sendall(b"GET /api/v1/tasks?limit=100 HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
        begun = time.monotonic()
        assert site.ask(API)[0] == 200
        assert time.monotonic() - begun < 5


def test_a_port_that_is_taken_is_told_at_once(site: Site) -> None:
    from mlora_operator.page.board import Board
    from mlora_operator.page.server import PageServer
    from mlora_operator.page.service import PageService

    with pytest.raises(OSError):
        PageServer(PageService(Board(), lambda: "", utc_now), *site.address).start()


def test_a_request_with_two_names_is_refused(site: Site) -> None:
    """A proxy may believe the one, and the page the other."""
    with socket.create_connection(site.address, 5) as plain:
        plain.sendall(f"GET {API} HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n".encode())
        assert plain.recv(1000).split(b" ")[1] == b"400"
