"""Rows from the web and from hubs: what is read, what is refused, and to whom a token is told."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pydantic import SecretStr

from mlora_worker.protocol import FailureReason, StorageAccess
from mlora_worker.storage.egress_policy import Destinations
from mlora_worker.storage.errors import (
    AccessRefused,
    ObjectNotFound,
    StorageError,
    StoreUnreachable,
    UselessAnswer,
)
from mlora_worker.storage.object_store.s3 import S3Timeouts
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import DatasetSource, open_sources
from mlora_worker.storage.remote.globs import is_data_file, matches, of_split
from mlora_worker.storage.remote.http import WebFiles
from tests.fixtures.served import served

HURRY = S3Timeouts(connect_seconds=2, read_seconds=2, attempts=3)
LOCAL = ("127.0.0.0/8",)


class Server(ThreadingHTTPServer):
    """Serves ``files``; ``redirects`` lead on; bodies of ``fragile`` paths break off once."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.fragile: set[str] = set()
        self.changing: set[str] = set()
        self.private: set[str] = set()
        self.broken: set[str] = set()  # their bodies always end too early
        self.slow: set[str] = set()  # their bodies come byte by byte
        self.head_status: int | None = None  # what HEAD is answered with, if not as GET
        self.seen: list[tuple[str, str, str | None]] = []  # method, path, Authorization

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server, path = self.server, self.path.partition("?")[0]
        server.seen.append((self.command, self.path, self.headers["Authorization"]))
        if self.command == "HEAD" and server.head_status is not None:
            self._answer(server.head_status, b"", {})
            return
        if path in server.redirects:
            self._answer(302, b"", {"Location": server.redirects[path], "X-Repo-Commit": "c0ffee"})
            return
        if path in server.private and self.headers["Authorization"] != "Bearer hub-token":
            self._answer(401, b"", {})
            return
        if path not in server.files:
            self._answer(404, b"", {})
            return
        data, wanted = server.files[path], self.headers["Range"]
        headers = {"ETag": '"one"', "Accept-Ranges": "bytes"}
        if wanted and not (path in server.changing and self.headers["If-Range"]):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            self._answer(206, data[int(first) : int(last) + 1 if last else None], headers)
        elif path in server.fragile:
            server.fragile.remove(path)
            self._answer(200, data, headers, sent=len(data) // 2)
        else:
            self._answer(200, data, headers)

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: dict[str, str], sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            path = self.path.partition("?")[0]
            for byte in body if path in self.server.slow else b"":
                with suppress(OSError):
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.005)
            if path in self.server.broken:
                sent = len(body) // 2
            if path not in self.server.slow:
                self.wfile.write(body[:sent])
        self.close_connection = sent is not None

    def log_message(self, *_: object) -> None:
        pass


def serving() -> AbstractContextManager[Server]:
    return served(Server())


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


def sources(
    server: Server | None = None, token: str | None = None, allowed: tuple[str, ...] = LOCAL
) -> DatasetSource:
    access = StorageAccess(hub_token=SecretStr(token) if token else None)
    return open_sources(
        open_store(access, allow_files=True),
        access,
        allowed_networks=allowed,
        hub_endpoint=server.url if server else "http://127.0.0.1:9",
        timeouts=HURRY,
    )


def web() -> WebFiles:
    return WebFiles(Destinations(LOCAL), HURRY, pause=lambda _: None)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "169.254.169.254",
        "100.100.100.200",
        "192.0.0.192",
        "168.63.129.16",
        "fd20:ce::254",
        "224.0.0.1",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
    ],
)
def test_addresses_that_only_a_worker_can_reach_are_refused_in_every_spelling(address: str) -> None:
    for found in ([address], ["93.184.216.34", address]):
        with pytest.raises(StorageError, match="an address that tasks must not reach") as caught:
            Destinations(resolve=lambda _host, _port, found=found: found).address_of(
                "host", 80, "http://host/x"
            )  # type: ignore[misc]
        assert caught.value.reason is FailureReason.INVALID_SPEC


@pytest.mark.parametrize("address", ["93.184.216.34", "10.0.0.7", "2606:2800:220:1::1"])
def test_other_addresses_are_connected_to_as_they_were_checked(address: str) -> None:
    assert (
        Destinations(resolve=lambda _host, _port: [address]).address_of("host", 443, "https://host/")
        == address
    )


def test_an_administrator_may_allow_a_network_by_name() -> None:
    allowed = Destinations(["169.254.0.0/16"], resolve=lambda _host, _port: ["::ffff:169.254.1.1"])
    assert allowed.address_of("host", 80, "http://host/")
    with pytest.raises(StorageError):
        Destinations(["169.254.0.0/16"], resolve=lambda _host, _port: ["127.0.0.1"]).address_of(
            "h", 80, "http://h/"
        )


def test_a_real_loopback_server_is_refused_unless_allowed(server: Server) -> None:
    server.files["/rows.jsonl"] = b"{}\n"
    with pytest.raises(StorageError, match="must not reach"):
        list(sources(allowed=()).pieces(f"{server.url}/rows.jsonl"))
    assert server.seen == []
    assert b"".join(sources().pieces(f"{server.url}/rows.jsonl?x=1")) == b"{}\n"


@pytest.mark.parametrize(
    "target",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]:1/",
        "file:///etc/passwd",
        "ftp://host/x",
        "http://[no end/x",
        "http://127.0.0.1:70000/x",
    ],
)
def test_where_a_server_leads_on_to_is_checked_as_the_first_address_was(server: Server, target: str) -> None:
    server.redirects["/rows"] = target
    with pytest.raises(StorageError) as caught:
        list(sources().pieces(f"{server.url}/rows"))
    assert caught.value.reason is FailureReason.INVALID_SPEC


def test_a_server_that_leads_on_for_ever_is_given_up(server: Server) -> None:
    server.redirects["/rows"] = "/rows"
    with pytest.raises(StorageError, match="redirects more than 5 times"):
        list(sources().pieces(f"{server.url}/rows"))


def test_where_it_leads_on_to_may_be_silent_though_the_server_is_not(server: Server) -> None:
    server.redirects["/rows"] = "http://127.0.0.1:1/x"
    with pytest.raises(UselessAnswer, match=r"no connection to 127\.0\.0\.1, where it leads on to"):
        list(web().pieces(f"{server.url}/rows"))
    with pytest.raises(StoreUnreachable, match="no connection to") as caught:
        list(web().pieces("http://127.0.0.1:1/x"))
    assert not isinstance(caught.value, UselessAnswer)


@pytest.mark.parametrize(
    ("status", "silent"), [(400, False), (416, False), (418, False), (500, True), (501, True), (503, True)]
)
def test_an_answer_about_one_address_is_not_the_servers_silence(
    server: Server, status: int, silent: bool
) -> None:
    server.head_status = status
    with pytest.raises(StoreUnreachable, match=f"answered {status}") as caught:
        web().look(f"{server.url}/rows")
    assert isinstance(caught.value, UselessAnswer) is not silent


def test_a_body_that_breaks_off_is_taken_up_where_it_broke(server: Server) -> None:
    server.files["/rows"] = bytes(range(256)) * 5000
    server.fragile.add("/rows")
    assert b"".join(web().pieces(f"{server.url}/rows")) == server.files["/rows"]
    assert [method for method, _, _ in server.seen] == ["GET", "GET"]


def test_a_file_that_changed_since_the_break_is_not_mixed(server: Server) -> None:
    server.files["/rows"] = b"x" * 500_000
    server.fragile.add("/rows")
    server.changing.add("/rows")
    with pytest.raises(StoreUnreachable, match="changed while it was being read"):
        list(web().pieces(f"{server.url}/rows"))


def test_what_is_not_there_and_what_may_not_be_read_have_their_own_names(server: Server) -> None:
    server.files["/private"] = b""
    server.private.add("/private")
    with pytest.raises(ObjectNotFound):
        list(sources().pieces(f"{server.url}/absent"))
    with pytest.raises(AccessRefused):
        list(sources().pieces(f"{server.url}/private"))
    with pytest.raises(StorageError, match="not a supported address"):
        list(sources().pieces("http://user:secret@127.0.0.1/x"))


@pytest.mark.parametrize(
    "address", ["http://[::1/x", "https://[store]/x", "http://host:70000/x", "file://[x/y"]
)
def test_what_is_no_address_is_a_mistake_in_the_spec(address: str) -> None:
    with pytest.raises(StorageError) as caught:
        list(sources().pieces(address))
    assert caught.value.reason is FailureReason.INVALID_SPEC


def test_versions_ranges_and_sizes_are_the_servers(server: Server) -> None:
    server.files["/rows.parquet"] = b"0123456789"
    url = f"{server.url}/rows.parquet"
    assert sources().size(url) == 10
    assert sources().read_range(url, 3, 4) == b"3456"
    assert sources().version(url) == '"one" 10'


@pytest.mark.parametrize(
    "read",
    [lambda files, url: files.read(url, most=10**6), lambda files, url: files.read_range(url, 0, 1000)],
    ids=["read", "read_range"],
)
def test_a_short_answer_that_breaks_off_is_the_servers_fault(
    server: Server, read: Callable[[WebFiles, str], object]
) -> None:
    server.files["/list"] = b"x" * 1000
    server.broken.add("/list")
    with pytest.raises(StoreUnreachable, match="the connection was lost while reading, after 500 bytes"):
        read(web(), f"{server.url}/list")


@pytest.mark.parametrize("status", [403, 405, 501])
def test_a_server_that_knows_get_alone_gives_rows_without_a_version(server: Server, status: int) -> None:
    server.files["/rows.jsonl"] = b"{}\n"
    server.head_status = status
    assert sources().version(f"{server.url}/rows.jsonl?signed=for-get") is None
    assert b"".join(sources().pieces(f"{server.url}/rows.jsonl?signed=for-get")) == b"{}\n"


def test_a_server_that_sends_a_byte_now_and_then_is_given_up(server: Server) -> None:
    server.files["/rows"] = b"x" * 100
    server.slow.add("/rows")
    now = iter(range(0, 100_000, 59))
    slow = WebFiles(Destinations(LOCAL), HURRY, pause=lambda _: None, clock=lambda: next(now))
    with pytest.raises(StoreUnreachable, match=r"sent \d+ bytes in 118 s, which is less than 1 KiB/s"):
        list(slow.pieces(f"{server.url}/rows"))
    with pytest.raises(StoreUnreachable, match="less than 1 KiB/s"):
        slow.read_range(f"{server.url}/rows", 0, 100)


def test_the_time_that_a_reader_takes_is_not_the_servers(server: Server) -> None:
    server.files["/rows"] = b"x" * 3_000_000
    now = 0.0
    files = WebFiles(Destinations(LOCAL), HURRY, pause=lambda _: None, clock=lambda: now)
    read = 0
    for piece in files.pieces(f"{server.url}/rows"):
        read += len(piece)
        now += 100_000
    assert read == 3_000_000


REPOSITORY = [
    "README.md",
    "data/test-00000-of-00001.parquet",
    "data/train-00000-of-00002.parquet",
    "data/train-00001-of-00002.parquet",
]


@pytest.fixture
def hub(server: Server) -> Server:
    api = "/api/datasets/acme/rows"
    for revision in ("main", "v1", "refs%2Fconvert%2Fparquet"):
        server.files[f"{api}/revision/{revision}"] = json.dumps({"sha": "c0ffee"}).encode()
    tree = [{"type": "file", "path": path} for path in REPOSITORY] + [{"type": "directory", "path": "data"}]
    server.files[f"{api}/tree/c0ffee"] = json.dumps(tree).encode()
    server.files["/datasets/acme/rows/resolve/c0ffee/data/test-00000-of-00001.parquet"] = b"PAR1"
    return server


@pytest.mark.parametrize(
    ("uri", "split", "expected"),
    [
        ("hf://datasets/acme/rows", "train", REPOSITORY[2:]),
        ("hf://datasets/acme/rows@v1", "test", REPOSITORY[1:2]),
        ("hf://datasets/acme/rows@refs/convert/parquet", "test", REPOSITORY[1:2]),
        ("hf://datasets/acme/rows@refs/convert/parquet/data/test-*", None, REPOSITORY[1:2]),
        ("hf://datasets/acme/rows/data/*.parquet", None, REPOSITORY[1:]),
        ("hf://datasets/acme/rows/**/train-*", None, REPOSITORY[2:]),
        ("hf://datasets/acme/rows/data/test-00000-of-00001.parquet", None, REPOSITORY[1:2]),
    ],
)
def test_a_hubs_files_are_those_of_one_commit(
    hub: Server, uri: str, split: str | None, expected: list[str]
) -> None:
    assert sources(hub).find(uri, split) == [f"hf://datasets/acme/rows@c0ffee/{path}" for path in expected]


def test_a_split_is_looked_for_in_paths_not_in_the_names_of_buckets_and_hosts(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").touch()
    address = (tmp_path / "train.jsonl").as_uri()
    assert sources().find(address, "train") == [address]
    for uri in (
        "s3://train/rows.jsonl",
        "https://train.example/rows.jsonl?of=train",
        address.replace("train.", "x."),
    ):
        with pytest.raises(ObjectNotFound, match="no file of split train matches"):
            sources().find(uri, "train")
    assert sources().find("https://host/rows/train.csv?x=1", "train") == ["https://host/rows/train.csv?x=1"]
    hub_file = "hf://datasets/acme/rows/data/test-00000-of-00001.parquet"
    server.files["/api/datasets/acme/rows/revision/main"] = json.dumps({"sha": "c0ffee"}).encode()
    with pytest.raises(ObjectNotFound, match="no file of split train matches"):
        sources(server).find(hub_file, "train")


@pytest.mark.parametrize("spelt", ["{}/my rows/ü*.jsonl", "{}/my%20rows/%C3%BC*.jsonl", "{}/*/*.jsonl"])
def test_a_pattern_of_local_files_may_be_spelt_as_people_do(tmp_path: Path, spelt: str) -> None:
    file = tmp_path / "my rows" / "ü.jsonl"
    file.parent.mkdir()
    file.touch()
    assert sources().find(f"file://{spelt.format(tmp_path)}", None) == [file.as_uri()]


def test_a_data_set_of_several_files_wants_a_split_rather_than_all_of_them(hub: Server) -> None:
    with pytest.raises(StorageError, match=r"choose some with dataset\.split"):
        sources(hub).find("hf://datasets/acme/rows", None)
    with pytest.raises(ObjectNotFound, match="no file of split validation"):
        sources(hub).find("hf://datasets/acme/rows", "validation")
    with pytest.raises(ObjectNotFound, match="HF_TOKEN"):
        sources(hub).find("hf://datasets/acme/absent", None)
    with pytest.raises(StorageError, match="write hf://datasets/OWNER/NAME"):
        sources(hub).find("hf://acme/rows", None)


def test_a_token_is_told_to_the_hub_and_to_nobody_that_it_leads_on_to(hub: Server) -> None:
    path = "/datasets/acme/rows/resolve/c0ffee/data/test-00000-of-00001.parquet"
    with serving() as elsewhere:
        elsewhere.files["/blob"] = b"PAR1"
        hub.redirects[path] = f"{elsewhere.url}/blob"
        uri = "hf://datasets/acme/rows@c0ffee/data/test-00000-of-00001.parquet"
        assert b"".join(sources(hub, "hub-token\n").pieces(uri)) == b"PAR1"
        assert [seen[2] for seen in hub.seen] == ["Bearer hub-token"]
        assert [seen[2] for seen in elsewhere.seen] == [None]


@pytest.mark.parametrize(
    ("pattern", "address", "does"),
    [
        ("s3://b/p/*.jsonl", "s3://b/p/a.jsonl", True),
        ("s3://b/p/*.jsonl", "s3://b/p/q/a.jsonl", False),
        ("s3://b/p/**/*.jsonl", "s3://b/p/a.jsonl", True),
        ("s3://b/p/**/*.jsonl", "s3://b/p/q/r/a.jsonl", True),
        ("s3://b/p/**", "s3://b/p/q/a", True),
        ("s3://b/p/a[1]?.*", "s3://b/p/a[1]?.csv", True),
        ("s3://b/p/a[1].*", "s3://b/p/a1.csv", False),
    ],
)
def test_stars_alone_have_a_meaning(pattern: str, address: str, does: bool) -> None:
    assert matches(pattern, address) is does


def test_a_split_is_a_word_of_the_path() -> None:
    names = [
        "train.jsonl",
        "data/train-0.csv",
        "train/x.csv",
        "my_train_part.csv",
        "trainer.csv",
        "constrain.csv",
    ]
    assert of_split(names, "train") == names[:4]
    assert [name for name in ("a.jsonl.GZ", "a.md", "a.csv", "a.parquet", "csv") if is_data_file(name)] == [
        "a.jsonl.GZ",
        "a.csv",
        "a.parquet",
    ]
