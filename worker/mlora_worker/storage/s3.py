"""Objects in an S3-compatible store, under ``s3://`` addresses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import boto3
import botocore.config
from botocore import UNSIGNED
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
)

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import ObjectNotFound, StorageError, StoreUnreachable
from mlora_worker.storage.s3_errors import code_of, explain, is_missing
from mlora_worker.storage.uri import s3_address

PIECE = 8 * 2**20  # bytes of one ranged read of a large object
PART = 16 * 2**20  # bytes of one part of a multipart upload; S3 wants at least 5 MiB
MOST_PARTS = 10_000  # S3's limit


@dataclass(frozen=True)
class Keys:
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


class _Ambient:
    """Marker: let the SDK find the identity (environment, shared file, the pod's or machine's role)."""


AMBIENT: Final = _Ambient()
Identity = Keys | _Ambient | None  # None: unsigned requests


@dataclass(frozen=True)
class Patience:
    """How long a silent store is waited for. An unreachable one is given up after attempts * connect_seconds
    and the SDK's back-off between them.
    """

    connect_seconds: float = 5.0
    read_seconds: float = 60.0
    attempts: int = 4


PATIENT = Patience()


class S3Store:
    """Thread-safe. ``keys`` is asked at every use; the client is made anew when they have changed."""

    def __init__(
        self,
        *,
        endpoint: str | None,
        region: str,
        keys: Callable[[], Identity],
        missing: FailureReason = FailureReason.DATASET_NOT_FOUND,
        patience: Patience = PATIENT,
        part: int = PART,
    ) -> None:
        self._endpoint = endpoint
        self._region = region
        self._keys = keys
        self._missing = missing
        self._patience = patience
        self._part = part
        self._lock = threading.Lock()
        self._client_of: tuple[Identity, Any] | None = None

    def read(self, uri: str) -> bytes:
        at = s3_address(uri)
        return self._body(uri, lambda client: client.get_object(Bucket=at.bucket, Key=at.key))

    def read_range(self, uri: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        at = s3_address(uri)
        wanted = f"bytes={start}-{start + length - 1}"
        data = self._body(uri, lambda client: client.get_object(Bucket=at.bucket, Key=at.key, Range=wanted))
        if len(data) != length:
            raise StorageError(
                FailureReason.INTERNAL_ERROR,
                f"{uri} is shorter than it should be: wanted {length} bytes from {start}, got {len(data)}",
            )
        return data

    def pieces(self, uri: str) -> Iterator[bytes]:
        size = self.size(uri)
        starts = range(0, size, PIECE)
        return (self.read_range(uri, start, min(PIECE, size - start)) for start in starts)

    def size(self, uri: str) -> int:
        at = s3_address(uri)
        with self._calling("read", uri) as client:
            return int(client.head_object(Bucket=at.bucket, Key=at.key)["ContentLength"])

    def version(self, uri: str) -> str:
        at = s3_address(uri)
        with self._calling("read", uri) as client:
            head = client.head_object(Bucket=at.bucket, Key=at.key)
        return f"{head['ETag']} {head['ContentLength']} {head['LastModified'].isoformat()}"

    def exists(self, uri: str) -> bool:
        try:
            self.size(uri)
        except ObjectNotFound:
            return False
        return True

    def write(self, uri: str, data: bytes) -> None:
        at = s3_address(uri)
        with self._calling("write", uri) as client:
            client.put_object(Bucket=at.bucket, Key=at.key, Body=data)

    def write_file(self, uri: str, path: Path) -> None:
        size = path.stat().st_size
        if size <= self._part:
            self.write(uri, path.read_bytes())
        else:
            self._write_in_parts(uri, path, max(self._part, -(-size // MOST_PARTS)), size)

    def delete(self, uri: str) -> None:
        at = s3_address(uri)
        with self._calling("delete", uri) as client, contextlib.suppress(client.exceptions.NoSuchKey):
            client.delete_object(Bucket=at.bucket, Key=at.key)

    def list(self, prefix: str) -> list[str]:
        at = s3_address(prefix)
        folder = f"{at.key.rstrip('/')}/" if at.key else ""
        with self._calling("list", prefix) as client:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=at.bucket, Prefix=folder)
            keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        # Some consoles store an empty object for the folder itself.
        return sorted(f"s3://{at.bucket}/{key}" for key in keys if not key.endswith("/"))

    def _write_in_parts(self, uri: str, path: Path, part: int, size: int) -> None:
        at = s3_address(uri)
        where = {"Bucket": at.bucket, "Key": at.key}
        with self._calling("write", uri) as client:
            _abort_leftovers(client, where)
            upload = {**where, "UploadId": client.create_multipart_upload(**where)["UploadId"]}
            try:
                tags: list[dict[str, Any]] = []
                with path.open("rb") as file:
                    while data := file.read(part):
                        number = len(tags) + 1
                        # The tag is handed back as it came: it is a digest on some stores only.
                        tags.append(
                            {
                                "PartNumber": number,
                                "ETag": client.upload_part(**upload, PartNumber=number, Body=data)["ETag"],
                            }
                        )
                _complete(client, upload, tags, size)
            except BaseException:
                with contextlib.suppress(ClientError, BotoCoreError):
                    client.abort_multipart_upload(**upload)
                raise

    def _body(self, uri: str, get: Callable[[Any], Any]) -> bytes:
        """Reads a whole answer. The SDK retries the request, but not a body that breaks off: so it is done
        here.
        """
        broken = ""
        for _ in range(self._patience.attempts):
            with self._calling("read", uri) as client:
                answer = get(client)
                try:
                    return bytes(answer["Body"].read())
                except (HTTPClientError, IncompleteReadError, ConnectionError) as error:
                    broken = type(error).__name__
        raise StoreUnreachable(
            f"{uri}: the connection broke while reading, {self._patience.attempts} times ({broken})"
        )

    @contextlib.contextmanager
    def _calling(self, action: str, uri: str) -> Iterator[Any]:
        keys = self._keys()
        try:
            yield self._client(keys)
        except (ClientError, BotoCoreError, ValueError) as error:  # ValueError: the endpoint is no URL
            secrets = (keys.access_key, keys.secret_key, keys.session_token) if isinstance(keys, Keys) else ()
            # Without its cause: what the store answered may quote a key, and a traceback would print it.
            raise explain(
                error, action=action, uri=uri, endpoint=self._endpoint, missing=self._missing, secrets=secrets
            ) from None

    def _client(self, keys: Identity) -> Any:
        with self._lock:
            if self._client_of is None or self._client_of[0] != keys:
                self._client_of = (keys, _new_client(self._endpoint, self._region, keys, self._patience))
            return self._client_of[1]


def _new_client(endpoint: str | None, region: str, keys: Identity, patience: Patience) -> Any:
    options: dict[str, Any] = {}
    if endpoint is not None:
        # Other stores than AWS often know neither bucket host names nor the SDK's checksum headers
        # (boto/boto3#4392); the adapter's own manifest has SHA-256 sums.
        options = {
            "s3": {"addressing_style": "path"},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
    if keys is None:
        options["signature_version"] = UNSIGNED
    config = botocore.config.Config(
        connect_timeout=patience.connect_seconds,
        read_timeout=patience.read_seconds,
        retries={"mode": "standard", "total_max_attempts": patience.attempts},
        max_pool_connections=16,
        **options,
    )
    known: dict[str, Any] = (
        {
            "aws_access_key_id": keys.access_key,
            "aws_secret_access_key": keys.secret_key,
            "aws_session_token": keys.session_token,
        }
        if isinstance(keys, Keys)
        else {}
    )
    return boto3.session.Session(region_name=region, **known).client(
        "s3", endpoint_url=endpoint, config=config
    )


def _abort_leftovers(client: Any, where: dict[str, str]) -> None:
    """A killed upload's parts cost money and are seen by nobody. Not every store or policy lets us look: then
    be it.
    """
    try:
        found = client.list_multipart_uploads(Bucket=where["Bucket"], Prefix=where["Key"]).get("Uploads", ())
        for upload in found:
            if upload["Key"] == where["Key"]:
                client.abort_multipart_upload(**where, UploadId=upload["UploadId"])
    except ClientError:
        return


def _complete(client: Any, upload: dict[str, str], tags: list[dict[str, Any]], size: int) -> None:
    try:
        client.complete_multipart_upload(**upload, MultipartUpload={"Parts": tags})
    except ClientError as error:
        # The reply to a first, successful attempt was lost and the SDK asked again: the object tells
        if code_of(error) != "NoSuchUpload":
            raise
        try:
            head = client.head_object(Bucket=upload["Bucket"], Key=upload["Key"])
        except ClientError as gone:
            raise (error if is_missing(gone) else gone) from None
        if head["ContentLength"] != size:
            raise error from None
