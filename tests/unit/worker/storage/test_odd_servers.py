"""S3-compatible servers that know less than AWS, or answer oddly: real HTTP, answers of our own making."""

from __future__ import annotations

import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from pydantic import SecretStr

from mlora_worker.protocol import FailureReason, StorageAccess
from mlora_worker.storage.errors import AccessRefused, ObjectNotFound, StorageError, StoreUnreachable
from mlora_worker.storage.probe import probe_output
from mlora_worker.storage.s3 import Keys, Patience, S3Store
from mlora_worker.storage.store import Store, open_store, open_store_from_files

HURRY = Patience(connect_seconds=0.5, read_seconds=2, attempts=2)
PART = 64 * 2**10


class OddServer(ThreadingHTTPServer):
    """Keeps objects in memory. ``oddity`` is what it does differently; ``requests`` is what it saw."""

    daemon_threads = True

    def __init__(self, oddity: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.oddity = oddity
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[tuple[str, str]] = []
        self.keys_seen: list[str] = []
        self.broken_bodies = 1
        self.scheme = "http"

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: OddServer

    def log_message(self, *_: object) -> None: ...

    def _handle(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        self.server.requests.append((self.command, self.path))
        if found := re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", "")):
            self.server.keys_seen.append(found[1])
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        oddity = self.server.oddity
        if "Content-Length" not in self.headers and self.command in ("PUT", "POST"):
            self._refuse(411, "MissingContentLength")
        elif any(
            name.lower().startswith("x-amz-checksum") or name.lower() == "x-amz-trailer"
            for name in self.headers
        ):
            self._refuse(501, "NotImplemented")
        elif "STREAMING" in self.headers.get("x-amz-content-sha256", ""):
            self._refuse(411, "MissingContentLength")
        elif oddity == "refuses keys":
            self._refuse(403, "InvalidAccessKeyId", "the key AKIDKEY with topsecret is unknown")
        elif oddity == "read only" and self.command != "GET":
            self._refuse(403, "AccessDenied")
        elif self.command == "POST" and "uploads" in query:
            self.server.uploads["1"] = {}
            self._answer(
                200, b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            )
        elif self.command == "POST" and "uploadId" in query:
            self._complete(url.path)
        elif self.command == "PUT" and "uploadId" in query:
            if oddity == "breaks at part 2" and query["partNumber"] == ["2"]:
                self._refuse(400, "EntityTooSmall")
            else:
                self.server.uploads["1"][int(query["partNumber"][0])] = body
                self._answer(200, b"", ETag='"not a digest"')
        elif self.command == "DELETE" and "uploadId" in query:
            self.server.uploads.pop(query["uploadId"][0], None)
            self._answer(204, b"")
        elif self.command == "PUT":
            self.server.objects[url.path] = body
            self._answer(200, b"", ETag='"not a digest"')
        elif self.command == "DELETE":
            self.server.objects.pop(url.path, None)
            self._answer(204, b"")
        elif url.path in self.server.objects:
            self._send(self.server.objects[url.path])
        else:
            self._refuse(404, "NoSuchKey")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

    def _complete(self, path: str) -> None:
        parts = self.server.uploads.pop("1", None)
        if parts is None:
            self._refuse(404, "NoSuchUpload")
            return
        self.server.objects[path] = b"".join(parts[number] for number in sorted(parts))
        if self.server.oddity == "loses the reply":
            self.server.oddity = ""
            self.close_connection = True
            self.connection.close()
        else:
            self._answer(
                200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
            )

    def _send(self, content: bytes) -> None:
        status = 200
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            content, status = content[int(found[1]) : int(found[2]) + 1], 206
        if self.server.oddity == "breaks bodies off" and self.command == "GET" and self.server.broken_bodies:
            self.server.broken_bodies -= 1
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.close_connection = True
        else:
            self._answer(status, content)

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())

    def _answer(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def odd_server(oddity: str = "", certificate: Path | None = None) -> Iterator[OddServer]:
    """``certificate`` is a file with key and certificate; with it, the server speaks https."""
    server = OddServer(oddity)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.scheme = "https"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def store_of(server: OddServer) -> S3Store:
    return S3Store(
        endpoint=server.endpoint,
        region="us-east-1",
        keys=lambda: Keys("AKIDKEY", "topsecret"),
        patience=HURRY,
        part=PART,
    )


def task_store(endpoint: str) -> Store:
    access = StorageAccess(
        endpoint=endpoint, access_key=SecretStr("AKIDKEY\n"), secret_key=SecretStr(" topsecret")
    )
    return open_store(access, allow_files=False, patience=HURRY)


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (PART * 3 // 256) + b"tail")
    return path


def test_a_server_that_knows_no_checksums_and_no_chunked_bodies_is_written_and_read(big: Path) -> None:
    with odd_server() as server:
        store = store_of(server)
        store.write("s3://bucket/small", b"content")
        store.write_file("s3://bucket/big", big)
        assert store.read("s3://bucket/small") == b"content"
        assert store.read("s3://bucket/big") == big.read_bytes()
        assert store.size("s3://bucket/big") == big.stat().st_size
        probe_output(store, "s3://bucket/out")
        assert set(server.objects) == {"/bucket/small", "/bucket/big"}, "buckets are part of the path"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "certificate.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=odd -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(
        [*command.split(), "-keyout", path, "-out", tmp_path / "only"], check=True, capture_output=True
    )
    path.write_bytes(path.read_bytes() + (tmp_path / "only").read_bytes())
    return path


def test_the_same_holds_over_https_where_the_sdk_would_send_chunks_and_trailers(
    big: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    with odd_server(certificate=certificate) as server:
        store = store_of(server)
        store.write("s3://bucket/small", b"content")
        store.write_file("s3://bucket/big", big)
        assert store.read("s3://bucket/small") == b"content"
        assert store.read("s3://bucket/big") == big.read_bytes()


def test_buckets_stay_in_the_path_whatever_the_machines_own_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "config"
    settings.write_text("[default]\ns3 =\n  addressing_style = virtual\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(settings))
    with odd_server() as server:
        server.objects["/bucket/x"] = b"x"
        named = server.endpoint.replace("127.0.0.1", "localhost")
        assert task_store(named).read("s3://bucket/x") == b"x"


def test_part_tags_that_are_no_digests_are_handed_back_and_not_judged(big: Path) -> None:
    with odd_server() as server:
        store_of(server).write_file("s3://bucket/big", big)
        assert server.objects["/bucket/big"] == big.read_bytes()


def test_an_upload_that_breaks_is_aborted_and_leaves_no_object(big: Path) -> None:
    with odd_server("breaks at part 2") as server:
        with pytest.raises(StorageError, match=r"answered 400 EntityTooSmall") as caught:
            store_of(server).write_file("s3://bucket/big", big)
        assert caught.value.reason is FailureReason.UPLOAD_FAILED
        assert server.uploads == {}
        assert server.objects == {}


def test_a_lost_reply_to_a_completed_upload_is_no_failure(big: Path) -> None:
    with odd_server("loses the reply") as server:
        store_of(server).write_file("s3://bucket/big", big)
        assert server.objects["/bucket/big"] == big.read_bytes()
        assert [method for method, _ in server.requests][-3:] == ["POST", "POST", "HEAD"]


def test_a_body_that_breaks_off_is_read_again() -> None:
    with odd_server("breaks bodies off") as server:
        server.objects["/bucket/rows"] = b"one\ntwo\n" * 1000
        assert b"".join(store_of(server).pieces("s3://bucket/rows")) == b"one\ntwo\n" * 1000
        assert server.broken_bodies == 0


def test_bodies_that_always_break_off_end_as_unreachable() -> None:
    with odd_server("breaks bodies off") as server:
        server.broken_bodies = 100
        server.objects["/bucket/rows"] = b"x" * 1000
        with pytest.raises(StoreUnreachable, match="the connection broke while reading, 2 times"):
            store_of(server).read("s3://bucket/rows")


def test_a_refused_key_is_reported_without_quoting_it() -> None:
    with odd_server("refuses keys") as server:
        with pytest.raises(AccessRefused, match="does not know the access key") as caught:
            probe_output(task_store(server.endpoint), "s3://bucket/out")
        shown = f"{caught.value} {caught.value.__cause__} {caught.value.__suppress_context__}"
        assert "AKIDKEY" not in shown
        assert "topsecret" not in shown
        assert caught.value.__suppress_context__, "a traceback would print what the server said"
        assert set(server.keys_seen) == {"AKIDKEY"}, "white space around a key is not part of it"


def test_a_folder_that_may_only_be_read_fails_the_probe_with_what_is_missing() -> None:
    with odd_server("read only") as server:
        with pytest.raises(
            AccessRefused, match=r"may not write s3://bucket/out/\.mlora-write-probe"
        ) as caught:
            probe_output(task_store(server.endpoint), "s3://bucket/out")
        assert caught.value.reason is FailureReason.ACCESS_DENIED


def test_a_missing_object_is_named() -> None:
    with odd_server() as server:
        store = task_store(server.endpoint)
        with pytest.raises(ObjectNotFound, match=r"s3://bucket/rows does not exist at http://127") as caught:
            list(store.pieces("s3://bucket/rows"))
        assert caught.value.reason is FailureReason.DATASET_NOT_FOUND
        assert not store.exists("s3://bucket/rows")


def test_nobody_at_the_endpoint_is_said_soon() -> None:
    store = open_store(
        StorageAccess(endpoint="http://127.0.0.1:9"), allow_files=False, patience=Patience(attempts=1)
    )
    with pytest.raises(StoreUnreachable, match=r"no connection to http://127\.0\.0\.1:9") as caught:
        probe_output(store, "s3://bucket/out")
    assert caught.value.reason is FailureReason.STORAGE_UNREACHABLE


def test_an_endpoint_that_is_no_url_is_a_mistake_in_the_spec() -> None:
    with pytest.raises(StorageError, match=r"storage endpoint s3\.storage:8333") as caught:
        task_store("s3.storage:8333").read("s3://bucket/x")
    assert caught.value.reason is FailureReason.INVALID_SPEC


def test_without_keys_requests_are_unsigned() -> None:
    with odd_server() as server:
        server.objects["/bucket/x"] = b"public"
        store = open_store(StorageAccess(endpoint=server.endpoint), allow_files=False, patience=HURRY)
        assert store.read("s3://bucket/x") == b"public"
        assert server.keys_seen == []


def test_rotated_key_files_are_taken_up_at_the_next_use(tmp_path: Path) -> None:
    (tmp_path / "AWS_ACCESS_KEY_ID").write_text("FIRST\n")
    (tmp_path / "AWS_SECRET_ACCESS_KEY").write_text("secret\n")
    with odd_server() as server:
        server.objects["/bucket/x"] = b"x"
        store = open_store_from_files(
            server.endpoint, "us-east-1", tmp_path, allow_files=False, patience=HURRY
        )
        store.read("s3://bucket/x")
        (tmp_path / "AWS_ACCESS_KEY_ID").write_text("SECOND\n")
        store.read("s3://bucket/x")
        assert server.keys_seen == ["FIRST", "SECOND"]
