"""Web servers and hubs that lie, never end, or hardly answer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from mlora_worker.protocol import FailureReason
from mlora_worker.storage import wire
from mlora_worker.storage.egress_policy import Destinations
from mlora_worker.storage.errors import StorageError, StoreUnreachable, TooLarge, UselessAnswer
from mlora_worker.storage.object_store.s3_client import S3Timeouts
from mlora_worker.storage.remote.http import WebFiles
from mlora_worker.storage.remote.hub import HubClient, RepositoryPath
from tests.fixtures.hostile_server import Answer, Asked, HostileServer, endless, hostile, said

HURRY = S3Timeouts(connect_seconds=2, read_seconds=5, attempts=1)
MUCH = bytes(2**16)
AT = RepositoryPath("acme", "rows", "main", "")


def web() -> WebFiles:
    return WebFiles(Destinations(("127.0.0.0/8",)), HURRY, pause=lambda _: None)


def hub(server: HostileServer) -> HubClient:
    return HubClient(web(), None, server.url)


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: endless(MUCH, said(200, Content_Length=None)),
        lambda _: endless(MUCH, said(200, Content_Length=str(200 * 2**30))),
        lambda _: endless(b"HTTP/1.1 100 Go on\r\n\r\n" * 1000),
        lambda _: endless(
            b"1;" + b"x" * 60_000 + b"\r\nx\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        ),
        lambda _: endless(MUCH, b"HTTP/1.1 200 OK\r\nX: "),
        lambda _: endless(MUCH, b""),
    ],
    ids=["without a size", "of 200 GB", "go on", "chunks with long names", "one header line", "no HTTP"],
)
def test_answers_without_end_are_given_up(answer: Answer) -> None:
    with hostile(answer) as server:
        url = f"{server.url}/x"
        calls: list[Callable[[], object]] = [
            lambda: web().read(url, most=1000),
            lambda: web().read_range(url, 0, 1000),
            lambda: hub(server).commit(AT),
        ]
        for call in calls:
            with pytest.raises(StorageError):
                call()
        assert server.sent < 96 * 2**20


def test_what_is_larger_than_such_a_file_can_be_is_named() -> None:
    with hostile(lambda _: [said(200, bytes(1001))]) as server:
        with pytest.raises(TooLarge, match="/x has more than 1000 bytes") as caught:
            web().read(f"{server.url}/x", most=1000)
        assert caught.value.reason is FailureReason.INVALID_SPEC


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n", said(200, Content_Length="100000")])
def test_a_server_that_sends_a_byte_now_and_then_is_given_up(
    monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    """In its header, too."""
    monkeypatch.setattr(wire, "GRACE_SECONDS", 0.3)
    over = threading.Event()

    def drops(_: Asked) -> Iterator[bytes]:
        yield begin
        while not over.wait(0.02):
            yield b"x"

    with hostile(drops) as server:
        with pytest.raises(StoreUnreachable, match=r"bytes in 0 s, which is less than 1 KiB/s"):
            list(web().pieces(f"{server.url}/x"))
        over.set()


@pytest.mark.parametrize("size", ["9" * 400, "9" * 5000, "-1", "0x10", "1 2", str(2**60)])
def test_a_size_that_no_file_could_have_is_none(size: str) -> None:
    with hostile(lambda _: [said(200, Content_Length=size)]) as server:
        assert web().look(f"{server.url}/x").size is None
    part = said(206, b"x", Content_Range=f"bytes 0-0/{size}")
    with hostile(lambda _: [part]) as server:
        assert web().probe(f"{server.url}/x").size is None


def test_another_part_than_the_one_that_was_asked_for_is_refused() -> None:
    part = said(206, b"0123", Content_Range="bytes 0-3/10")
    with hostile(lambda _: [part]) as server, pytest.raises(StoreUnreachable, match="sent others"):
        web().read_range(f"{server.url}/x", 2, 4)


def entries(number: int, name: str = "file") -> bytes:
    return json.dumps([{"type": "file", "path": f"{name}-{one}.jsonl"} for one in range(number)]).encode()


def next_page(body: bytes) -> Answer:
    def answer(_: Asked) -> Iterable[bytes]:
        return [said(200, body, Link='</next>; rel="next"')]

    return answer


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (next_page(b"[]"), "does not end its list of files after 100 pages"),
        (next_page(entries(9000)), "more than 100000 objects"),
        (lambda _: [said(200, entries(1, "x" * 2000))], "a name of more than 1024 bytes"),
        (lambda _: [said(200, b"[" * 10**6)], "did not answer with JSON"),
        (lambda _: [said(200, b'[{"type": "file", "path": "x", "size": 1e999}]')], "did not answer with JSON"),
        (lambda _: [said(200, b"[]", Link='<http://[>; rel="next"')], "continues at an invalid address"),
        (lambda _: [said(200, b"[]", Link='<http://else/>; rel="next"')], "at another host"),
        (lambda _: [said(200, b" " * (9 * 2**20))], "more than 8 MiB"),
    ],
    ids=["pages", "entries", "names", "depth", "numbers", "no address", "elsewhere", "spaces"],
)  # fmt: skip
def test_lists_of_files_without_end_or_sense_are_given_up(answer: Answer, told: str) -> None:
    with hostile(answer) as server, pytest.raises(StorageError, match=told) as caught:
        hub(server).files(AT, "c0ffee")
    assert isinstance(caught.value, UselessAnswer | TooLarge), (
        "it says nothing of the hub's other repositories"
    )


def test_sizes_and_sums_that_a_hub_makes_up_are_none() -> None:
    listed = [
        {"type": "file", "path": "a", "size": -1, "oid": "x"},
        {"type": "file", "path": "b", "size": True},
        {"type": "file", "path": "c", "size": 2**60, "lfs": {"oid": "sha256:no", "size": 10**19}},
        {"type": "file", "path": "d", "lfs": []},
        {"type": "file", "path": ["e"]},
        {"type": "file"},
        "f",
    ]
    with hostile(lambda _: [said(200, json.dumps(listed).encode())]) as server:
        found = hub(server).entries(AT, "c0ffee")
    assert [(file.path, file.size, file.sha256, file.git_blob) for file in found] == [
        (name, None, None, None) for name in ("a", "b", "c", "d")
    ]


@pytest.mark.parametrize("commit", ["x" * 1000, "../../secret", "", "a b", 5, None, ["c0ffee"]])
def test_what_is_no_commit_is_refused(commit: object) -> None:
    body = json.dumps({"sha": commit}).encode()
    with (
        hostile(lambda _: [said(200, body)]) as server,
        pytest.raises(StoreUnreachable, match="the commit of"),
    ):
        hub(server).commit(AT)


def test_a_long_link_takes_no_time() -> None:
    link = "<" * 60_000
    with hostile(lambda _: [said(200, b"[]", Link=link)]) as server:
        began = time.process_time()
        assert hub(server).files(AT, "c0ffee") == []
        assert time.process_time() - began < 1
