"""Objects in an S3-compatible store, under ``s3://`` addresses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
)
from urllib3.exceptions import HTTPError

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import ObjectNotFound, StorageError, StoreUnreachable
from mlora_worker.storage.multipart import PART, part_size, upload_in_parts
from mlora_worker.storage.s3_client import PATIENT, PLAIN, Identity, Keys, Manners, Patience, new_client
from mlora_worker.storage.s3_errors import explain
from mlora_worker.storage.uri import normal_endpoint, s3_address

__all__ = ["PART", "PATIENT", "PIECE", "Keys", "Patience", "S3Store"]

PIECE = 8 * 2**20  # bytes of one ranged read of a large object


# The SDK lets these through where a connection breaks in the body of an answer, also of a refusal.
_BROKEN = (HTTPError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)


class S3Store:
    """Thread-safe. ``keys`` and ``ca_certificate`` are asked at every use; a change makes a new client."""

    def __init__(
        self,
        *,
        endpoint: str | None,
        region: str,
        keys: Callable[[], Identity],
        missing: FailureReason = FailureReason.DATASET_NOT_FOUND,
        patience: Patience = PATIENT,
        manners: Manners = PLAIN,
        ca_certificate: Callable[[], str | None] = lambda: None,
        part: int = PART,
    ) -> None:
        self._endpoint = endpoint
        self._region = region
        self._keys = keys
        self._missing = missing
        self._patience = patience
        self._manners = manners
        self._ca_certificate = ca_certificate
        self._part = part
        self._lock = threading.Lock()
        self._client_of: tuple[tuple[Identity, str | None], Any] | None = None

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

    def origin(self, uri: str) -> str:
        """Also where the environment names the endpoint, or the SDK makes it of the region."""
        with self._calling("read", uri) as client:
            return normal_endpoint(str(client.meta.endpoint_url))

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
            at = s3_address(uri)
            where = {"Bucket": at.bucket, "Key": at.key}
            with self._calling("write", uri) as client:
                upload_in_parts(client, where, path, part_size(size, self._part), size)

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
                except (HTTPClientError, IncompleteReadError, ConnectionError, *_BROKEN) as error:
                    broken = type(error).__name__
        raise StoreUnreachable(
            f"{uri}: the connection broke while reading, {self._patience.attempts} times ({broken})"
        )

    @contextlib.contextmanager
    def _calling(self, action: str, uri: str) -> Iterator[Any]:
        keys = self._keys()
        try:
            yield self._client(keys)
        except _BROKEN as error:
            raise StoreUnreachable(
                f"cannot {action} {uri}: the connection broke ({type(error).__name__})"
            ) from None
        except (ClientError, BotoCoreError, ValueError) as error:  # ValueError: the endpoint is no URL
            secrets = (keys.access_key, keys.secret_key, keys.session_token) if isinstance(keys, Keys) else ()
            # Without its cause: what the store answered may quote a key, and a traceback would print it.
            raise explain(
                error, action=action, uri=uri, endpoint=self._endpoint, missing=self._missing, secrets=secrets
            ) from None

    def _client(self, keys: Identity) -> Any:
        known = (keys, self._ca_certificate())
        with self._lock:
            if self._client_of is None or self._client_of[0] != known:
                client = new_client(
                    self._endpoint, self._region, keys, self._patience, self._manners, known[1]
                )
                self._client_of = (known, client)
            return self._client_of[1]
