"""S3-compatible servers that know less than AWS, or answer oddly: real HTTP, answers of our own making."""

from __future__ import annotations

import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import md5
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from pydantic import SecretStr

from mlora_worker.protocol import Addressing, Checksums, FailureReason, StorageAccess
from mlora_worker.storage.artifacts.write_probe import probe_output
from mlora_worker.storage.errors import AccessRefused, ObjectNotFound, StorageError, StoreUnreachable
from mlora_worker.storage.object_store.s3 import S3Store
from mlora_worker.storage.object_store.s3_client import Keys, S3Options, S3Timeouts, new_client
from mlora_worker.storage.object_store.store import Store, open_store, open_store_from_files
from tests.fixtures.served import Answering

MOST = 2**20  # bytes

LOCAL = ("127.0.0.0/8",)
HURRY = S3Timeouts(connect_seconds=0.5, read_seconds=2, attempts=2)
PART = 64 * 2**10
KEY = "big"


ROLE = b"""<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>
<AccessKeyId>OFTHEROLE</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>
<Expiration>2100-01-01T00:00:00Z</Expiration></Credentials><AssumedRoleUser><AssumedRoleId>i</AssumedRoleId>
<Arn>a</Arn></AssumedRoleUser></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""


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
        self.forgets = ""  # an upload that it lists and does not know
        self.away_at_part: int | None = None  # it answers ``away_with`` there
        self.away_with = 503
        self.scheme = "http"

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"


class _Handler(Answering):
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
        elif url.path.startswith("/sts") and b"Action=AssumeRoleWithWebIdentity" in body:
            self.answer(200, ROLE)
        elif oddity == "refuses keys":
            self._refuse(403, "InvalidAccessKeyId", "the key AKIDKEY with topsecret is unknown")
        elif oddity == "read only" and self.command != "GET":
            self._refuse(403, "AccessDenied")
        elif self.command == "POST" and "uploads" in query:
            self.server.uploads["1"] = {}
            self.answer(
                200, b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            )
        elif self.command == "POST" and "uploadId" in query:
            self._complete(url.path, query["uploadId"][0])
        elif self.command == "PUT" and "uploadId" in query:
            self._take_part(int(query["partNumber"][0]), query["uploadId"][0], body)
        elif self.command == "DELETE" and "uploadId" in query:
            self.server.uploads.pop(query["uploadId"][0], None)
            self.answer(204, b"")
        elif self.command == "PUT":
            self.server.objects[url.path] = body
            self.answer(200, b"", ETag='"not a digest"')
        elif self.command == "DELETE":
            self.server.objects.pop(url.path, None)
            self.answer(204, b"")
        elif self.command == "GET" and "uploads" in query and oddity == "digests":
            self.answer(200, self._uploads())
        elif self.command == "GET" and "uploadId" in query and oddity == "digests":
            self.answer(200, self._parts(query["uploadId"][0]))
        elif url.path in self.server.objects:
            self._send(self.server.objects[url.path])
        else:
            self._refuse(404, "NoSuchKey")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

    def _take_part(self, number: int, upload: str, body: bytes) -> None:
        if self.server.oddity == "breaks at part 2" and number == 2:
            self._refuse(400, "EntityTooSmall")
        elif number == self.server.away_at_part:
            self._refuse(self.server.away_with, "SlowDown")
        elif upload not in self.server.uploads or upload == self.server.forgets:
            self._refuse(404, "NoSuchUpload")
        else:
            self.server.uploads[upload][number] = body
            tag = (
                md5(body, usedforsecurity=False).hexdigest()
                if self.server.oddity == "digests"
                else "not a digest"
            )
            self.answer(200, b"", ETag=f'"{tag}"')

    def _uploads(self) -> bytes:
        made = "".join(
            f"<Upload><Key>{KEY}</Key><UploadId>{one}</UploadId><Initiated>2026-01-0{one}T00:00:00Z</Initiated></Upload>"
            for one in self.server.uploads
        )
        return f"<ListMultipartUploadsResult>{made}</ListMultipartUploadsResult>".encode()

    def _parts(self, upload: str) -> bytes:
        made = "".join(
            f"<Part><PartNumber>{number}</PartNumber><Size>{len(body)}</Size>"
            f"<ETag>&quot;{md5(body, usedforsecurity=False).hexdigest()}&quot;</ETag></Part>"
            for number, body in self.server.uploads.get(upload, {}).items()
        )
        return f"<ListPartsResult>{made}</ListPartsResult>".encode()

    def _complete(self, path: str, upload: str) -> None:
        parts = self.server.uploads.pop(upload, None)
        if parts is None:
            self._refuse(404, "NoSuchUpload")
            return
        self.server.objects[path] = b"".join(parts[number] for number in sorted(parts))
        if self.server.oddity == "loses the reply":
            self.server.oddity = ""
            self.close_connection = True
            self.connection.close()
        else:
            self.answer(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")

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
            self.answer(status, content)

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        self.answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())


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
        timeouts=HURRY,
        part=PART,
    )


def task_store(endpoint: str) -> Store:
    access = StorageAccess(
        endpoint=endpoint, access_key=SecretStr("AKIDKEY\n"), secret_key=SecretStr(" topsecret")
    )
    return open_store(access, allow_files=False, allowed_networks=LOCAL, timeouts=HURRY)


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
        assert store.read("s3://bucket/small", MOST) == b"content"
        assert store.read("s3://bucket/big", MOST) == big.read_bytes()
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
        assert store.read("s3://bucket/small", MOST) == b"content"
        assert store.read("s3://bucket/big", MOST) == big.read_bytes()


def test_a_stores_own_certificate_is_trusted_when_its_secret_brings_it(
    tmp_path: Path, certificate: Path
) -> None:
    """As a task's plan carries it, and as a file beside a pipeline's keys, taken up when it appears."""
    pem = certificate.read_text()
    pem = pem[pem.index("-----BEGIN CERTIFICATE-----") :]
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        (keys / name).write_text("x")
    with odd_server(certificate=certificate) as server:
        server.objects["/bucket/x"] = b"x"
        access = StorageAccess(endpoint=server.endpoint)
        store = open_store(access, allow_files=False, allowed_networks=LOCAL, timeouts=HURRY)
        with pytest.raises(
            StoreUnreachable, match=r"certificate of https://127.* is not trusted; put .* into ca\.crt"
        ):
            store.read("s3://bucket/x", MOST)
        trusting = access.model_copy(update={"ca_certificate": pem})
        assert (
            open_store(trusting, allow_files=False, allowed_networks=LOCAL, timeouts=HURRY).read(
                "s3://bucket/x", MOST
            )
            == b"x"
        )
        mounted = open_store_from_files(server.endpoint, "us-east-1", keys, allow_files=False, timeouts=HURRY)
        with pytest.raises(StoreUnreachable, match="is not trusted"):
            mounted.read("s3://bucket/x", MOST)
        (keys / "ca.crt").write_text(pem + "\n")
        assert mounted.read("s3://bucket/x", MOST) == b"x"


def test_what_is_no_certificate_is_a_mistake_in_the_secret() -> None:
    access = StorageAccess(
        endpoint="https://127.0.0.1:9", ca_certificate="-----BEGIN CERTIFICATE-----\nnonsense"
    )
    with pytest.raises(
        StorageError, match=r"ca\.crt of the storage Secret is not a PEM certificate"
    ) as caught:
        open_store(access, allow_files=False, allowed_networks=LOCAL, timeouts=HURRY).read(
            "s3://bucket/x", MOST
        )
    assert caught.value.reason is FailureReason.INVALID_SPEC


@pytest.mark.parametrize(
    ("endpoint", "addressing", "host"),
    [
        ("https://s3.acme.test", Addressing.AUTO, "s3.acme.test/bucket/key"),
        ("https://s3.acme.test", Addressing.VIRTUAL, "bucket.s3.acme.test/key"),
        ("https://S3.acme.test:443/", Addressing.PATH, "s3.acme.test/bucket/key"),
        ("http://10.0.0.1:9000/", Addressing.AUTO, "10.0.0.1:9000/bucket/key"),
        (None, Addressing.AUTO, "bucket.s3.amazonaws.com/key"),
        (None, Addressing.PATH, "s3.amazonaws.com/bucket/key"),
    ],
)
def test_buckets_are_addressed_as_the_store_wants_it_however_its_endpoint_is_spelt(
    endpoint: str | None, addressing: Addressing, host: str
) -> None:
    client = new_client(endpoint, "us-east-1", Keys("a", "b"), HURRY, S3Options(addressing=addressing))
    url = client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "key"})
    assert url.partition("?")[0].partition("://")[2].replace(":443", "") == host


@pytest.mark.parametrize(
    ("endpoint", "checksums", "calculation"),
    [
        ("https://s3.acme.test", Checksums.AUTO, "when_required"),
        ("https://s3.acme.test", Checksums.WHEN_SUPPORTED, "when_supported"),
        (None, Checksums.AUTO, "when_supported"),
        (None, Checksums.WHEN_REQUIRED, "when_required"),
    ],
)
def test_checksum_headers_are_sent_where_they_are_known_or_wished(
    endpoint: str | None, checksums: Checksums, calculation: str
) -> None:
    client = new_client(endpoint, "us-east-1", Keys("a", "b"), HURRY, S3Options(checksums=checksums))
    assert client.meta.config.request_checksum_calculation == calculation
    assert client.meta.config.response_checksum_validation == calculation


def test_a_server_without_checksums_refuses_a_store_that_was_told_to_send_them() -> None:
    """So the setting does what it says, and the default above is what passes."""
    with odd_server() as server:
        access = StorageAccess(endpoint=server.endpoint, checksums=Checksums.WHEN_SUPPORTED)
        with pytest.raises(StorageError, match="501 NotImplemented"):
            open_store(access, allow_files=False, allowed_networks=LOCAL, timeouts=HURRY).write(
                "s3://bucket/x", b"x"
            )


@pytest.mark.parametrize("key", ["a b/100% ü?x#y+z", "double//slash", "a/../b", "ends in a slash/", "~'()*!"])
def test_keys_are_taken_literally_whatever_they_are_spelt_like(key: str) -> None:
    with odd_server() as server:
        store = task_store(server.endpoint)
        store.write(f"s3://bucket/{key}", b"x")
        assert [unquote(path) for path in server.objects] == [f"/bucket/{key}"]
        assert store.read(f"s3://bucket/{key}", MOST) == b"x"


def test_a_pods_own_role_is_used_for_a_pipeline_without_a_secret_and_never_for_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Web identity: the environment names a role and the file of a token, and the SDK asks for keys by it."""
    token = tmp_path / "token"
    token.write_text("signed by the cluster")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with odd_server() as server:
        server.objects["/bucket/x"] = b"x"
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/trainer")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"{server.endpoint}/sts")
        store = open_store_from_files(server.endpoint, "us-east-1", None, allow_files=False, timeouts=HURRY)
        assert store.read("s3://bucket/x", MOST) == b"x"
        assert server.keys_seen == ["OFTHEROLE"]
        access = StorageAccess(endpoint=server.endpoint)
        assert (
            open_store(access, allow_files=False, allowed_networks=LOCAL, timeouts=HURRY).read(
                "s3://bucket/x", MOST
            )
            == b"x"
        )
        assert server.keys_seen == ["OFTHEROLE"]


def test_buckets_stay_in_the_path_whatever_the_machines_own_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "config"
    settings.write_text("[default]\ns3 =\n  addressing_style = virtual\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(settings))
    with odd_server() as server:
        server.objects["/bucket/x"] = b"x"
        named = server.endpoint.replace("127.0.0.1", "localhost")
        assert task_store(named).read("s3://bucket/x", MOST) == b"x"


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


def parts_sent(server: OddServer) -> list[str]:
    return [path.partition("partNumber=")[2][0] for method, path in server.requests if "partNumber=" in path]


@pytest.mark.parametrize("status", [503, 429])
def test_an_upload_that_broke_off_goes_on_with_the_parts_that_are_missing(big: Path, status: int) -> None:
    with odd_server("digests") as server:
        server.away_at_part, server.away_with = 3, status
        with pytest.raises(StoreUnreachable, match=f"answered {status}"):
            store_of(server).write_file(f"s3://bucket/{KEY}", big)
        assert sorted(server.uploads["1"]) == [1, 2], "what is there stays for the next try"
        server.away_at_part = None
        server.requests.clear()
        store_of(server).write_file(f"s3://bucket/{KEY}", big)
        assert parts_sent(server) == ["3", "4"]
        assert server.objects[f"/bucket/{KEY}"] == big.read_bytes()


def test_a_part_with_other_content_is_sent_again_though_it_has_the_same_size(big: Path) -> None:
    with odd_server("digests") as server:
        server.uploads["1"] = {1: bytes(PART), 2: big.read_bytes()[PART : 2 * PART], 4: b"else"}
        store_of(server).write_file(f"s3://bucket/{KEY}", big)
        assert parts_sent(server) == ["1", "3", "4"]
        assert server.objects[f"/bucket/{KEY}"] == big.read_bytes()


def test_where_tags_are_no_digests_every_part_is_sent_again(big: Path) -> None:
    with odd_server() as server:
        server.away_at_part = 2
        with pytest.raises(StoreUnreachable):
            store_of(server).write_file(f"s3://bucket/{KEY}", big)
        server.away_at_part = None
        server.requests.clear()
        store_of(server).write_file(f"s3://bucket/{KEY}", big)
        assert parts_sent(server) == ["1", "2", "3", "4"]


def test_of_several_unfinished_uploads_the_newest_goes_on_and_the_others_are_aborted(big: Path) -> None:
    with odd_server("digests") as server:
        server.uploads = {"2": {1: b"old"}, "1": {}, "3": {1: big.read_bytes()[:PART]}}
        store_of(server).write_file(f"s3://bucket/{KEY}", big)
        assert parts_sent(server) == ["2", "3", "4"]
        assert server.objects[f"/bucket/{KEY}"] == big.read_bytes()
        assert server.uploads == {}


def test_an_unfinished_upload_that_is_gone_when_it_is_taken_up_begins_anew(big: Path) -> None:
    with odd_server("digests") as server:
        server.uploads = {"3": {}}
        server.forgets = "3"
        store_of(server).write_file(f"s3://bucket/{KEY}", big)
        assert server.objects[f"/bucket/{KEY}"] == big.read_bytes()


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
        with pytest.raises(StoreUnreachable, match="the connection was lost while reading, 2 times"):
            store_of(server).read("s3://bucket/rows", MOST)


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
        StorageAccess(endpoint="http://127.0.0.1:9"),
        allow_files=False,
        allowed_networks=LOCAL,
        timeouts=S3Timeouts(attempts=1),
    )
    with pytest.raises(StoreUnreachable, match=r"no connection to http://127\.0\.0\.1:9") as caught:
        probe_output(store, "s3://bucket/out")
    assert caught.value.reason is FailureReason.STORAGE_UNREACHABLE


def test_an_endpoint_that_is_no_url_is_a_mistake_in_the_spec() -> None:
    store = S3Store(endpoint="s3.storage:8333", region="us-east-1", keys=lambda: None)
    with pytest.raises(
        StorageError, match=r"'s3\.storage:8333' is not a valid address.*such as https"
    ) as caught:
        store.size("s3://bucket/x")
    assert caught.value.reason is FailureReason.INVALID_SPEC


def test_without_keys_requests_are_unsigned() -> None:
    with odd_server() as server:
        server.objects["/bucket/x"] = b"public"
        store = open_store(
            StorageAccess(endpoint=server.endpoint), allow_files=False, allowed_networks=LOCAL, timeouts=HURRY
        )
        assert store.read("s3://bucket/x", MOST) == b"public"
        assert server.keys_seen == []


def test_rotated_key_files_are_taken_up_at_the_next_use(tmp_path: Path) -> None:
    (tmp_path / "AWS_ACCESS_KEY_ID").write_text("FIRST\n")
    (tmp_path / "AWS_SECRET_ACCESS_KEY").write_text("secret\n")
    with odd_server() as server:
        server.objects["/bucket/x"] = b"x"
        store = open_store_from_files(
            server.endpoint, "us-east-1", tmp_path, allow_files=False, timeouts=HURRY
        )
        store.read("s3://bucket/x", MOST)
        (tmp_path / "AWS_ACCESS_KEY_ID").write_text("SECOND\n")
        store.read("s3://bucket/x", MOST)
        assert server.keys_seen == ["FIRST", "SECOND"]
