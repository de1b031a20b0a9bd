"""Stores that lie, never end, or hardly answer: nothing that they say is believed, and nothing of it is hoarded."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from mlora_worker.protocol import FailureReason
from mlora_worker.storage import wire
from mlora_worker.storage.artifacts.adapter import find_published
from mlora_worker.storage.artifacts.checkpoint import newest_progress
from mlora_worker.storage.errors import StorageError, StoreUnreachable, TooLarge
from mlora_worker.storage.limits import Listing, Oversized, size_in
from mlora_worker.storage.object_store.file_store import FileStore
from mlora_worker.storage.object_store.s3 import PIECE, S3Store
from mlora_worker.storage.object_store.s3_client import Keys, S3Timeouts
from tests.fixtures.hostile_server import Answer, Asked, HostileServer, endless, hostile, said

HURRY = S3Timeouts(connect_seconds=2, read_seconds=5, attempts=1)
URI = "s3://bucket/key"
MUCH = bytes(2**16)


class Hostile:
    """A store that answers as a test says. Its client is made once: that takes longer than all the rest."""

    def __init__(self, server: HostileServer) -> None:
        self.server, self.now = server, 0.0
        keys = Keys("AKIDKEY", "topsecret")
        self.store = S3Store(
            endpoint=server.url,
            region="us-east-1",
            keys=lambda: keys,
            timeouts=HURRY,
            part=2**19,
            clock=lambda: self.now,
        )

    def answers(self, answer: Answer) -> S3Store:
        self.server.answer = answer
        return self.store


@pytest.fixture(scope="module")
def made() -> Iterator[Hostile]:
    with hostile(lambda _: ()) as server:
        made = Hostile(server)
        made.store.origin(URI)
        yield made


@pytest.fixture
def other(made: Hostile) -> Hostile:
    made.server.asked, made.server.sent, made.now = [], 0, 0.0
    return made


@pytest.fixture
def taken() -> Iterator[Callable[[], int]]:
    """Bytes of memory that Python took at most, since the test began."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def whole(size: str | None) -> Answer:
    """HEAD and GET alike: an object of that size, which goes on for ever."""

    def answer(asked: Asked) -> Iterable[bytes]:
        begin = said(200, Content_Length=size)
        return [begin] if asked.method == "HEAD" else endless(MUCH, begin)

    return answer


@pytest.mark.parametrize("size", [None, str(200 * 2**30)], ids=["without a size", "of 200 GB"])
@pytest.mark.parametrize("most", [1000, 2**20, 3 * PIECE])
def test_an_object_without_end_is_given_up_at_its_limit(
    other: Hostile, size: str | None, most: int, taken: Callable[[], int]
) -> None:
    with pytest.raises((TooLarge, StoreUnreachable)):
        other.answers(whole(size)).read(URI, most)
    assert other.server.sent < most + 32 * 2**20, "what is in the sockets' buffers is on its way already"
    assert taken() < 2 * most + 32 * 2**20


def test_a_manifest_of_200_gb_is_named_and_not_read(other: Hostile, taken: Callable[[], int]) -> None:
    store = other.answers(whole(str(200 * 2**30)))
    with pytest.raises(TooLarge, match=r"s3://bucket/out/manifest\.json has more than 1 MiB") as caught:
        find_published(store, "s3://bucket/out")
    assert caught.value.reason is FailureReason.INVALID_SPEC
    assert taken() < 32 * 2**20


def page(keys: Iterable[str], token: str | None) -> bytes:
    entries = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in keys)
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    told = f"<IsTruncated>{'true' if token else 'false'}</IsTruncated>{more}"
    return said(200, f"<ListBucketResult>{told}{entries}</ListBucketResult>".encode())


def test_a_list_without_an_end_is_given_up_after_as_many_as_were_asked_for(other: Hostile) -> None:
    def answer(_: Asked) -> list[bytes]:
        number = len(other.server.asked)
        return [page((f"x/{number}-{one}" for one in range(1000)), f"token{number}")]

    store = other.answers(answer)
    with pytest.raises(StoreUnreachable, match="has more than 5000 objects"):
        store.list("s3://bucket/x", 5000)
    assert len(other.server.asked) == 6
    with pytest.raises(StoreUnreachable, match="has more than 10000 objects"):
        newest_progress(store, "s3://bucket/x")


def test_a_list_of_pages_with_nothing_on_them_ends_too(other: Hostile) -> None:
    def answer(_: Asked) -> list[bytes]:
        other.now += 100
        return [page((), f"token{len(other.server.asked)}")]

    with pytest.raises(StoreUnreachable, match="a list without end for 900 s"):
        other.answers(answer).list("s3://bucket/x", 5000)
    assert len(other.server.asked) == 10


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: endless(MUCH, said(200, b"<ListBucketResult>", Content_Length=None)),
        lambda _: endless(MUCH, said(403, b"<Error>", Content_Length=None)),
        lambda _: endless(MUCH, said(503, b"<Error>", Content_Length=str(10**15))),
        lambda _: endless(b"HTTP/1.1 100 Go on\r\n\r\n" * 1000),
        lambda _: endless(b"X: " + b"x" * 10_000 + b"\r\n", b"HTTP/1.1 200 OK\r\n"),
        lambda _: endless(MUCH, b"HTTP/1.1 200 OK\r\nX: "),
        lambda _: endless(MUCH),
    ],
    ids=["list", "refusal", "excuse", "go on", "header lines", "one header line", "no HTTP at all"],
)
@pytest.mark.parametrize("call", ["list", "read"])
def test_answers_without_end_are_given_up(
    other: Hostile, answer: Answer, call: str, taken: Callable[[], int]
) -> None:
    store = other.answers(answer)
    with pytest.raises(StorageError):
        store.list("s3://bucket/x", 10) if call == "list" else store.read(URI, 1000)
    assert other.server.sent < 64 * 2**20
    assert taken() < 96 * 2**20


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "frames",
    [
        endless(b"1;" + b"x" * 60_000 + b"\r\nx\r\n", CHUNKED),
        endless(b"x: y\r\n" * 1000, CHUNKED + b"1\r\nx\r\n0\r\n"),
        endless(MUCH, CHUNKED + b"1"),
    ],
    ids=["chunks with long names", "trailers", "a chunk's size"],
)
def test_what_is_around_a_body_is_counted_too(
    other: Hostile, frames: Iterator[bytes], taken: Callable[[], int]
) -> None:
    with pytest.raises(StorageError):
        other.answers(lambda _: frames).read(URI, 1000)
    assert other.server.sent < 64 * 2**20
    assert taken() < 32 * 2**20


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n", said(200, Content_Length="100000")])
@pytest.mark.parametrize("call", ["list", "read", "size"])
def test_a_store_that_sends_a_byte_now_and_then_is_given_up(
    other: Hostile, monkeypatch: pytest.MonkeyPatch, begin: bytes, call: str
) -> None:
    """Though each of them comes well before the time is over that is waited for one."""
    monkeypatch.setattr(wire, "GRACE_SECONDS", 0.3)
    over = threading.Event()

    def drops() -> Iterator[bytes]:
        yield begin
        while not over.wait(0.02):
            yield b"x"

    store = other.answers(lambda _: drops())
    calls: dict[str, Callable[[], object]] = {
        "list": lambda: store.list(URI, 9),
        "read": lambda: store.read(URI, 10**6),
        "size": lambda: store.size(URI),
    }
    if call == "size" and begin.endswith(b"\r\n\r\n"):
        assert calls[call]() == 100_000, "it has said all that it was asked for"
    else:
        with pytest.raises(StoreUnreachable, match=r"bytes in 0 s, which is less than 1 KiB/s"):
            calls[call]()
    over.set()


def lying(size: int, data: bytes, *, ranges: bool = True) -> Answer:
    """HEAD says ``size``, GET has ``data``. ``ranges``: parts say which they are."""

    def answer(asked: Asked) -> list[bytes]:
        if asked.method == "HEAD":
            return [said(200, Content_Length=str(size))]
        if asked.length is None:
            return [said(200, data)]
        part = data[asked.first : asked.first + asked.length]
        told = f"bytes {asked.first}-{asked.first + len(part) - 1}/{len(data)}"
        return [said(206, part, Content_Range=told if ranges else None)]

    return answer


@pytest.mark.parametrize("size", [0, 5, 999, 1001, 10**15])
def test_a_size_that_is_not_the_objects_is_noticed(other: Hostile, size: int) -> None:
    store = other.answers(lying(size, b"x" * 1000))
    with pytest.raises(StoreUnreachable, match=r"has another size|is shorter"):
        list(store.pieces(URI))
    with pytest.raises(StorageError):
        store.read(URI, 2 * PIECE)
    assert other.server.sent < 10_000


@pytest.mark.parametrize("ranges", [True, False])
def test_a_size_that_is_the_objects_is_fine(other: Hostile, ranges: bool) -> None:
    data = bytes(range(256)) * (2 * PIECE // 256) + b"end"
    store = other.answers(lying(len(data), data, ranges=ranges))
    assert b"".join(store.pieces(URI)) == data
    assert store.read(URI, len(data)) == data
    store = other.answers(lying(0, b"", ranges=ranges))
    assert store.read(URI, 10) == store.read(URI, 2 * PIECE) == b""
    assert list(store.pieces(URI)) == []


@pytest.mark.parametrize("size", [None, "abc", "-5", "9" * 400, "9" * 5000, str(2**50 + 1), "\u0661\u0662"])
def test_a_size_that_no_file_could_have_is_none(other: Hostile, size: str | None) -> None:
    assert size_in(size) is None
    told = None if size is None else size.encode().decode("latin-1")
    with pytest.raises(StoreUnreachable):
        other.answers(lambda _: [said(200, Content_Length=told)]).size(URI)


def test_a_store_that_gives_the_whole_for_a_part_is_read_no_further(
    other: Hostile, taken: Callable[[], int]
) -> None:
    store = other.answers(whole(str(2**40)))
    assert store.read_range(URI, 0, 10) == bytes(10)
    with pytest.raises(StoreUnreachable, match="does not support range requests"):
        store.read_range(URI, 5, 10)
    with pytest.raises(StoreUnreachable, match="does not support range requests"):
        next(store.pieces(URI))
    assert other.server.sent < 48 * 2**20
    assert taken() < 32 * 2**20


def test_more_than_the_part_that_was_asked_for_is_not_taken(other: Hostile, taken: Callable[[], int]) -> None:
    store = other.answers(lambda _: endless(MUCH, said(206, Content_Length=None)))
    assert store.read_range(URI, 7, 10) == bytes(10)
    assert taken() < 32 * 2**20


def test_another_part_than_the_one_that_was_asked_for_is_refused(other: Hostile) -> None:
    store = other.answers(lambda _: [said(206, b"0123", Content_Range="bytes 0-3/10")])
    with pytest.raises(StoreUnreachable, match="requested bytes from 2, but the store sent others"):
        store.read_range(URI, 2, 4)


def listed(entry: bytes) -> bytes:
    return said(200, b"<ListBucketResult><Contents>" + entry + b"</Contents></ListBucketResult>")


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("list", listed(b"<Key>x</Key><Size>" + b"9" * 5000 + b"</Size>")),
        ("list", listed(b"<Size>1</Size>")),
        ("list", listed(b"<Key>" + b"k" * 2000 + b"</Key>")),
        ("list", said(400, b"<Error>" + b"<a>" * 20_000 + b"</a>" * 20_000 + b"</Error>")),
        ("list", said(200, b"[1]")),
        ("version", said(200, Last_Modified="Mon, 99 Foo 99999 00:00:00 GMT", ETag='"x"')),
        ("version", said(200, b"", ETag='"x"')),
        ("version", said(200, b"")),
        ("read", said(200, b"xyz", Content_Length="3x")),
    ],
    ids=[
        "a size of 5000 digits",
        "no name",
        "a long name",
        "a refusal in depth",
        "no XML",
        "no date",
        "when?",
        "no version",
        "a length that is none",
    ],
)
def test_nonsense_in_an_answer_is_the_stores_fault(other: Hostile, method: str, answer: bytes) -> None:
    store = other.answers(lambda _: [answer])
    call: dict[str, Callable[[], object]] = {
        "list": lambda: store.list("s3://bucket/x", 10),
        "version": lambda: store.version(URI),
        "read": lambda: store.read(URI, 1000),
    }
    with pytest.raises(StoreUnreachable):
        call[method]()


def test_unfinished_uploads_without_end_hold_no_upload_up(other: Hostile, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(2**20))

    def answer(asked: Asked) -> list[bytes]:
        number = len(other.server.asked)
        if asked.method == "GET":
            kind = "Parts" if "uploadId" in asked.path else "MultipartUploads"
            entry = f"<Upload><Key>key</Key><UploadId>{number}</UploadId></Upload>"
            marker = f"<NextKeyMarker>{number}</NextKeyMarker>"
            if kind == "Parts":
                entry = f"<Part><PartNumber>{number}</PartNumber><Size>1</Size><ETag>x</ETag></Part>"
                marker = f"<NextPartNumberMarker>{number}</NextPartNumberMarker>"
            told = f"<List{kind}Result><IsTruncated>true</IsTruncated>{marker}{entry}</List{kind}Result>"
            return [said(200, told.encode())]
        if asked.method == "POST":
            return [
                said(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")
            ]
        return [said(200, b"", ETag='"x"')]

    other.answers(answer).write_file(URI, tmp_path / "big")
    assert len(other.server.asked) < 80


def test_names_that_fill_the_memory_are_no_list() -> None:
    def fill(listing: Listing) -> None:
        for number in range(10**6):
            listing.add(f"{number:01000}")

    with pytest.raises(Oversized, match="32 MiB together"):
        fill(Listing(10**6))
    with pytest.raises(Oversized, match="a name of more than 1024 bytes"):
        Listing(10).add("\u00e9" * 600)


def test_files_are_read_no_further_than_allowed_either(tmp_path: Path) -> None:
    store = FileStore()
    with pytest.raises(StorageError, match="it is not a file"):
        store.read("file:///dev/zero", 100)
    with pytest.raises(StorageError, match="it is not a file"):
        next(store.pieces("file:///dev/zero"))
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(2**40)  # a hole
    with pytest.raises(TooLarge):
        store.read(big.as_uri(), 1000)
    for number in range(5):
        (tmp_path / str(number)).touch()
    with pytest.raises(StorageError, match="the folder has more than 3 objects"):
        store.list(tmp_path.as_uri(), 3)


def test_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="it is not a file"):
        FileStore().read((tmp_path / "pipe").as_uri(), 100)
