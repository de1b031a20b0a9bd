"""Stores whose policies demand encryption or checksums: met by a setting, or refused with the setting's name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.exceptions import ClientError
from pydantic import SecretStr

from mlora_worker.protocol import Checksums, Encryption, FailureReason, StorageAccess
from mlora_worker.storage.errors import AccessRefused, StorageError
from mlora_worker.storage.object_store import s3
from mlora_worker.storage.object_store.s3_client import S3Timeouts
from mlora_worker.storage.object_store.s3_errors import explain
from mlora_worker.storage.object_store.store import Store, open_store
from tests.fixtures.served import Answering, served

HURRY = S3Timeouts(connect_seconds=2, read_seconds=5, attempts=2)
KEY = "arn:aws:kms:eu-west-1:111122223333:key/1234abcd-12ab"


class StrictServer(ThreadingHTTPServer):
    """Takes objects that are begun with ``demands``; with ``sums``, those that have checksums, of each part at the end."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.demands: dict[str, str] = {}
        self.sums = False
        self.objects: dict[str, bytes] = {}
        self.parts: dict[int, tuple[bytes, str]] = {}


class _Handler(Answering):
    protocol_version = "HTTP/1.1"
    server: StrictServer

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_DELETE = do_HEAD = do_GET

    def do_PUT(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "aws-chunked":
            body = _unchunked(body)
        if "partNumber" not in query:
            if self._is_refused():
                return
            self.server.objects[url.path] = body
            self.answer(200, b"", ETag='"t"')
            return
        encryption = [name for name in self.headers if name.lower().startswith("x-amz-server-side")]
        assert not encryption, "an upload says it once, when it begins"
        number = int(query["partNumber"][0])
        self.server.parts[number] = body, f"sum{number}"
        sums = {"x-amz-checksum-crc32": f"sum{number}"} if self.server.sums else {}
        self.answer(200, b"", ETag=f'"{number}"', **sums)

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        if "uploads" in parse_qs(url.query, keep_blank_values=True):
            if not self._is_refused(begins=True):
                made = (
                    b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
                )
                self.answer(200, made)
            return
        told = re.findall(r"<ChecksumCRC32>(\w+)</ChecksumCRC32>", body)
        if self.server.sums and told != [one for _, one in self.server.parts.values()]:
            words = b"The complete request must include the checksum for each part."
            self.answer(400, b"<Error><Code>InvalidRequest</Code><Message>" + words + b"</Message></Error>")
            return
        self.server.objects[url.path] = b"".join(data for data, _ in self.server.parts.values())
        self.answer(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")

    def _is_refused(self, begins: bool = False) -> bool:
        sums = "x-amz-checksum-algorithm" if begins else "x-amz-sdk-checksum-algorithm"
        if any(self.headers.get(name) != value for name, value in self.server.demands.items()):
            self.answer(403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
        elif self.server.sums and sums not in self.headers:
            words = (
                b"Content-MD5 OR x-amz-checksum- HTTP header is required for Put requests with Object Lock"
            )
            self.answer(400, b"<Error><Code>InvalidRequest</Code><Message>" + words + b"</Message></Error>")
        else:
            return False
        return True


def _unchunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size.partition(b";")[0], 16)
        if not length:
            break
        whole, body = whole + rest[:length], rest[length + 2 :]
    return whole


@pytest.fixture
def server() -> Iterator[StrictServer]:
    with served(StrictServer()) as made:
        yield made


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(s3, "PART", 2**16)
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 700)
    return path


def store(server: StrictServer, **access: Any) -> Store:
    keys = {"access_key": SecretStr("a"), "secret_key": SecretStr("b")}
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    given = StorageAccess(endpoint=endpoint, **keys, **access)
    made = open_store(given, allow_files=False, allowed_networks=("127.0.0.0/8",), timeouts=HURRY)
    made._s3._part = 2**16  # type: ignore[attr-defined]
    return made


def written(store: Store, server: StrictServer, big: Path) -> None:
    store.write("s3://b/small", b"content")
    store.write_file("s3://b/big", big)
    assert server.objects == {"/b/small": b"content", "/b/big": big.read_bytes()}


@pytest.mark.parametrize(
    ("demands", "access"),
    [
        ({"x-amz-server-side-encryption": "AES256"}, {"server_side_encryption": Encryption.AES256}),
        (
            {
                "x-amz-server-side-encryption": "aws:kms",
                "x-amz-server-side-encryption-aws-kms-key-id": KEY,
            },
            {"server_side_encryption": Encryption.KMS, "kms_key_id": KEY},
        ),
    ],
)
def test_a_policy_that_demands_encryption_is_met_by_small_and_large_files(
    server: StrictServer, big: Path, demands: dict[str, str], access: dict[str, Any]
) -> None:
    server.demands = demands
    written(store(server, **access), server, big)


def test_a_store_that_demands_checksums_gets_those_of_each_part_too(server: StrictServer, big: Path) -> None:
    server.sums = True
    written(store(server, checksums=Checksums.WHEN_SUPPORTED), server, big)


def test_without_the_setting_the_refusal_names_it(server: StrictServer) -> None:
    server.demands = {"x-amz-server-side-encryption": "AES256"}
    with pytest.raises(AccessRefused, match=r"storage\.serverSideEncryption and storage\.kmsKeyId"):
        store(server).write("s3://b/x", b"x")
    server.demands, server.sums = {}, True
    with pytest.raises(StorageError, match=r"set storage\.checksums to whenSupported") as caught:
        store(server).write("s3://b/x", b"x")
    assert caught.value.reason is FailureReason.INVALID_SPEC


@pytest.mark.parametrize(
    ("status", "code", "words", "told"),
    [
        (400, "KMS.NotFoundException", "Invalid keyId", "storage.kmsKeyId"),
        (400, "KMS.DisabledException", "the key is disabled", "storage.kmsKeyId"),
        (403, "AccessDenied", "User x is not authorized to perform: kms:GenerateDataKey", "kms:GenerateDataKey"),
        (400, "InvalidEncryptionAlgorithmError", "", "storage.serverSideEncryption"),
        (501, "NotImplemented", "Server side encryption specified but KMS is not configured", "storage.kmsKeyId"),
        (400, "InvalidRequest", "The object was stored using a form of Server Side Encryption. The correct "
         "parameters must be provided to retrieve the object.", "SSE-C"),
        (400, "MissingContentMD5", "Missing required header: Content-MD5", "storage.checksums"),
        (400, "BadDigest", "", "storage.checksums"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("action", ["read", "write"])
def test_what_a_strict_store_says_is_told_with_the_field(
    status: int, code: str, words: str, told: str, action: str
) -> None:
    answer: Any = {
        "Error": {"Code": code, "Message": words},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    error = explain(
        ClientError(answer, "PutObject"),
        action=action,
        uri="s3://b/x",
        endpoint="https://s3.test",
        missing=FailureReason.DATASET_NOT_FOUND,
    )
    assert told in str(error)
    assert code in str(error)


def test_a_plan_without_the_settings_is_what_it_was() -> None:
    assert "erverSideEncryption" not in json.dumps(StorageAccess().model_dump(mode="json", exclude_none=True))
