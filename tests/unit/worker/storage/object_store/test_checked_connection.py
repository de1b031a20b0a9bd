"""A task's store is reached at the address that was judged, whatever its name leads to, and keys go nowhere else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mlora_worker.protocol import Addressing, FailureReason, StorageAccess
from mlora_worker.storage.egress_policy import Destinations
from mlora_worker.storage.errors import StorageError, StoreUnreachable
from mlora_worker.storage.object_store.s3 import Keys, S3Store, S3Timeouts
from mlora_worker.storage.object_store.s3_client import S3Options
from mlora_worker.storage.object_store.store import open_store

HURRY = S3Timeouts(connect_seconds=2.0, read_seconds=5.0, attempts=3)
LOCAL = ("127.0.0.0/8",)


class Seen(ThreadingHTTPServer):
    """Answers ``status`` with ``headers`` to everything, and counts what it was asked."""

    def __init__(self, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.status, self.headers, self.asked = status, headers or {}, []  # type: ignore[var-annotated]
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    server: Seen

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Host"), self.headers.get("Authorization")))
        self.send_response(self.server.status)
        for name, value in {"Content-Length": "2", **self.server.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b"ok")

    do_HEAD = do_PUT = do_GET

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def served(*args: Any) -> Iterator[Seen]:
    server = Seen(*args)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def store(endpoint: str, destinations: Destinations, **options: Any) -> S3Store:
    return S3Store(
        endpoint=endpoint, region="us-east-1", keys=lambda: Keys("AKID", "secret"), timeouts=HURRY,
        destinations=destinations, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "169.254.169.254", "::1", "fe80::1", "100.100.100.200", "0.0.0.0"]
)
def test_a_name_that_leads_inward_is_refused_before_anything_is_sent(address: str) -> None:
    asked: list[str] = []

    def resolve(host: str, _: int) -> list[str]:
        asked.append(host)
        return ["93.184.216.34", address]

    with pytest.raises(
        StorageError, match=f"s3.tenant.example is {address}, an address that tasks must not"
    ) as caught:
        store("http://s3.tenant.example", Destinations(resolve=resolve)).size("s3://bucket/key")
    assert caught.value.reason is FailureReason.INVALID_SPEC
    assert asked == ["s3.tenant.example"], "one refusal is final"


@pytest.mark.parametrize("manner", [Addressing.PATH, Addressing.VIRTUAL])
def test_the_address_that_was_judged_is_connected_to_and_the_name_is_asked_once(manner: Addressing) -> None:
    asked: list[str] = []

    def resolve(host: str, _: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    with served() as server:
        reached = store(
            f"http://s3.tenant.example:{server.port}", Destinations(LOCAL, resolve), options=S3Options(manner)
        )
        assert reached.size("s3://bucket/key") == 2
        ((path, host, _),) = server.asked
    name = "bucket.s3.tenant.example" if manner is Addressing.VIRTUAL else "s3.tenant.example"
    assert asked == [name]
    assert host == f"{name}:{server.port}"
    assert path == ("/key" if manner is Addressing.VIRTUAL else "/bucket/key")


def test_a_bucket_as_part_of_the_host_is_judged_too() -> None:
    def resolve(host: str, _: int) -> list[str]:
        return ["127.0.0.1"] if host.startswith("inward.") else ["93.184.216.34"]

    reached = store(
        "http://s3.tenant.example", Destinations(resolve=resolve), options=S3Options(Addressing.VIRTUAL)
    )
    with pytest.raises(StorageError, match=r"inward\.s3\.tenant\.example is 127\.0\.0\.1"):
        reached.size("s3://inward/key")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_keys_are_sent_to_no_other_host(status: int) -> None:
    with served() as other:
        elsewhere = f"http://127.0.0.1:{other.port}/bucket/key"
        headers = {"Location": elsewhere, "x-amz-bucket-region": f"x@127.0.0.1:{other.port}/"}
        with served(status, headers) as server:
            with pytest.raises(StorageError):
                store(f"http://127.0.0.1:{server.port}", Destinations(LOCAL)).size("s3://bucket/key")
            assert server.asked
        assert other.asked == []


def test_a_dead_address_of_several_is_passed_over() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.9", 0))
        with served() as server:
            found = Destinations(LOCAL, lambda _host, _port: ["127.0.0.9", "127.0.0.1"])
            assert store(f"http://s3.tenant.example:{server.port}", found).size("s3://bucket/key") == 2


def test_an_unknown_name_is_tried_again_and_may_pass() -> None:
    asked: list[str] = []

    def resolve(host: str, _: int) -> list[str]:
        asked.append(host)
        raise OSError("temporary failure")

    with pytest.raises(StoreUnreachable, match=r"no connection to http://s3\.tenant\.example"):
        store("http://s3.tenant.example", Destinations(resolve=resolve)).size("s3://bucket/key")
    assert len(asked) == HURRY.attempts


def test_a_task_reaches_no_loopback_unless_its_pipeline_allows_it() -> None:
    with served() as server:
        access = StorageAccess(endpoint=f"http://127.0.0.1:{server.port}")
        with pytest.raises(StorageError, match=r"spec\.worker\.allowedNetworks") as caught:
            open_store(access, allow_files=False, timeouts=HURRY).size("s3://bucket/key")
        assert caught.value.reason is FailureReason.INVALID_SPEC
        assert server.asked == []
        allowed = open_store(access, allow_files=False, allowed_networks=LOCAL, timeouts=HURRY)
        assert allowed.size("s3://bucket/key") == 2


def test_through_a_proxy_a_name_that_leads_inward_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        inward = Destinations(resolve=lambda _host, _port: ["169.254.169.254"])
        with pytest.raises(StorageError, match="must not reach"):
            store("http://s3.tenant.example", inward).size("s3://bucket/key")
        assert proxy.asked == []
        outward = Destinations(resolve=lambda _host, _port: ["93.184.216.34"])
        assert store("http://s3.tenant.example", outward).size("s3://bucket/key") == 2
        assert proxy.asked[0][0] == "http://s3.tenant.example/bucket/key"
