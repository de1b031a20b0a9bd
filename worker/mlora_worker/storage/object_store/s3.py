"""Objects in an S3-compatible store, under ``s3://`` addresses."""

from __future__ import annotations

import contextlib
import io
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import partial
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
from mlora_worker.storage.egress_policy import Destinations
from mlora_worker.storage.errors import ObjectNotFound, StoreUnreachable, TooLarge, UselessAnswer
from mlora_worker.storage.limits import LARGEST_OBJECT, Listing, Oversized
from mlora_worker.storage.object_store.multipart import PART, part_size, upload_in_parts
from mlora_worker.storage.object_store.s3_client import (
    DEFAULT_TIMEOUTS,
    PLAIN,
    Identity,
    Keys,
    S3Options,
    S3Timeouts,
    new_client,
)
from mlora_worker.storage.object_store.s3_errors import explain
from mlora_worker.storage.object_store.slices import FileSlice
from mlora_worker.storage.uri import normal_endpoint, s3_address
from mlora_worker.storage.wire import BadAnswer

__all__ = ["DEFAULT_TIMEOUTS", "PART", "PIECE", "Keys", "S3Store", "S3Timeouts"]

PIECE = 8 * 2**20  # bytes of one ranged read of a large object


_LISTING_SECONDS = 900.0
_PART = re.compile(
    r"bytes ([0-9]{1,16})-[0-9]{1,16}/(?:([0-9]{1,16})|\*)"
)  # first byte, and the whole's size

# What nonsense in an answer breaks the SDK with: a number of a million digits, a date of no calendar, no field at all.
_NOT_UNDERSTOOD = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)

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
        timeouts: S3Timeouts = DEFAULT_TIMEOUTS,
        options: S3Options = PLAIN,
        ca_certificate: Callable[[], str | None] = lambda: None,
        part: int = PART,
        clock: Callable[[], float] = time.monotonic,
        destinations: Destinations | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._region = region
        self._keys = keys
        self._missing = missing
        self._timeouts = timeouts
        self._options = options
        self._ca_certificate = ca_certificate
        self._part = part
        self._clock = clock
        self._destinations = destinations
        self._lock = threading.Lock()
        self._client_of: tuple[tuple[Identity, str | None], Any] | None = None

    def read(self, uri: str, most: int) -> bytes:
        if most > PIECE:
            size = self.size(uri)
            if size > most:
                raise TooLarge(uri, most)
            whole = io.BytesIO()  # its bytes are handed out without another copy
            whole.writelines(self._parts(uri, size))
            return whole.getvalue()
        data = self._body(uri, {}, most + 1)
        if len(data) > most:
            raise TooLarge(uri, most)
        return data

    def read_range(self, uri: str, start: int, length: int) -> bytes:
        return self._range(uri, start, length) if length else b""

    def pieces(self, uri: str) -> Iterator[bytes]:
        return self._parts(uri, self.size(uri))

    def _parts(self, uri: str, size: int) -> Iterator[bytes]:
        """Of an object that is said to have ``size`` bytes."""
        if not size and self._body(uri, {}, 1):
            raise _another_size(uri, size)
        for start in range(0, size, PIECE):
            yield self._range(uri, start, min(PIECE, size - start), size)

    def size(self, uri: str) -> int:
        size = self._head(uri).get("ContentLength")
        if not isinstance(size, int) or not 0 <= size <= LARGEST_OBJECT:
            raise UselessAnswer(f"cannot read {uri}: the store reports an invalid size")
        return size

    def version(self, uri: str) -> str:
        head = self._head(uri)
        changed = head.get("LastModified")
        if not head.get("ETag") or not isinstance(changed, datetime):
            raise UselessAnswer(f"cannot read {uri}: the store does not report its version")
        return f"{head['ETag']} {head.get('ContentLength')} {changed.isoformat()}"

    def _head(self, uri: str) -> Mapping[str, Any]:
        at = s3_address(uri)
        with self._calling("read", uri) as client:
            found: Mapping[str, Any] = client.head_object(Bucket=at.bucket, Key=at.key)
        return found

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
            client.put_object(Bucket=at.bucket, Key=at.key, Body=data, **self._options.of_writing)

    def write_file(self, uri: str, path: Path) -> None:
        size = path.stat().st_size
        at = s3_address(uri)
        where = {"Bucket": at.bucket, "Key": at.key}
        if size <= self._part:
            with self._calling("write", uri) as client, FileSlice(path, 0, size) as data:
                client.put_object(**where, Body=data)
        else:
            with self._calling("write", uri) as client:
                upload_in_parts(
                    client, where, path, part_size(size, self._part), size, self._options.of_writing
                )

    def delete(self, uri: str) -> None:
        at = s3_address(uri)
        with self._calling("delete", uri) as client, contextlib.suppress(client.exceptions.NoSuchKey):
            client.delete_object(Bucket=at.bucket, Key=at.key)

    def list(self, prefix: str, most: int) -> list[str]:
        at = s3_address(prefix)
        folder = f"{at.key.rstrip('/')}/" if at.key else ""
        listing, deadline = Listing(most), self._clock() + _LISTING_SECONDS
        with self._calling("list", prefix) as client:
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=at.bucket, Prefix=folder):
                for entry in page.get("Contents", ()):
                    # Some consoles store an empty object for the folder itself.
                    if not entry["Key"].endswith("/"):
                        listing.add(f"s3://{at.bucket}/{entry['Key']}")
                if self._clock() > deadline:
                    raise BadAnswer(f"has been sending a list without end for {_LISTING_SECONDS:.0f} s")
        return sorted(listing.names)

    def _range(self, uri: str, start: int, length: int, size: int | None = None) -> bytes:
        """Exactly these bytes, of an object of ``size`` bytes where that is known."""
        wanted = {"Range": f"bytes={start}-{start + length - 1}"}
        data = self._body(uri, wanted, length, lambda answer: _check_part(uri, answer, start, length, size))
        if len(data) != length:
            raise UselessAnswer(
                f"{uri} is shorter than expected: wanted {length} bytes from {start}, got {len(data)}"
            )
        return data

    def _body(
        self,
        uri: str,
        options: Mapping[str, str],
        most: int,
        check: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> bytes:
        """The first ``most`` bytes of an answer that passes ``check``. The SDK retries the request, but not a body that
        breaks off: so it is done here.
        """
        at, broken = s3_address(uri), ""
        for _ in range(self._timeouts.attempts):
            with self._calling("read", uri) as client:
                answer = client.get_object(Bucket=at.bucket, Key=at.key, **options)
                with contextlib.closing(answer["Body"]) as body:
                    check(answer)
                    try:
                        return _first(body, most)
                    except (HTTPClientError, IncompleteReadError, ConnectionError, *_BROKEN) as error:
                        broken = type(error).__name__
        raise StoreUnreachable(
            f"{uri}: the connection was lost while reading, {self._timeouts.attempts} times ({broken})"
        )

    @contextlib.contextmanager
    def _calling(self, action: str, uri: str) -> Iterator[Any]:
        keys = self._keys()
        secrets = (keys.access_key, keys.secret_key, keys.session_token) if isinstance(keys, Keys) else ()
        explained = partial(
            explain, action=action, uri=uri, endpoint=self._endpoint, missing=self._missing, secrets=secrets
        )
        try:
            client = self._client(keys)
        except (BotoCoreError, ValueError) as error:  # ValueError: the endpoint is no URL
            raise explained(error) from None
        try:
            yield client
        except _BROKEN as error:
            raise StoreUnreachable(
                f"cannot {action} {uri}: the connection was lost ({type(error).__name__})"
            ) from None
        except (BadAnswer, Oversized) as error:
            kind = UselessAnswer if isinstance(error, Oversized) else StoreUnreachable
            raise kind(f"cannot {action} {uri}: the store {error}") from None
        except (ClientError, BotoCoreError) as error:
            # Without its cause: what the store answered may quote a key, and a traceback would print it.
            raise explained(error) from None
        except _NOT_UNDERSTOOD as error:
            raise StoreUnreachable(
                f"cannot {action} {uri}: the store sent an invalid response ({type(error).__name__})"
            ) from None

    def _client(self, keys: Identity) -> Any:
        known = (keys, self._ca_certificate())
        with self._lock:
            if self._client_of is None or self._client_of[0] != known:
                client = new_client(
                    self._endpoint,
                    self._region,
                    keys,
                    self._timeouts,
                    self._options,
                    known[1],
                    self._destinations,
                )
                self._client_of = (known, client)
            return self._client_of[1]


def _first(body: Any, most: int) -> bytes:
    """At most so many bytes; what follows is left where it is. A body that ends too early raises IncompleteReadError."""
    pieces, left = [], most
    while left and (piece := body.read(min(left, PIECE))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _check_part(uri: str, answer: Mapping[str, Any], start: int, length: int, size: int | None) -> None:
    """Raises UselessAnswer where an answer is another part than the one that was asked for, or one of an object of
    another size."""
    if answer["ResponseMetadata"]["HTTPStatusCode"] != 206 and (start or size not in (None, length)):
        raise UselessAnswer(f"cannot read {uri}: the store does not support range requests")
    part = _PART.fullmatch(str(answer.get("ContentRange", "")))
    if part is None:
        return
    if int(part[1]) != start:
        raise UselessAnswer(f"{uri}: requested bytes from {start}, but the store sent others")
    if size is not None and part[2] is not None and int(part[2]) != size:
        raise _another_size(uri, size)


def _another_size(uri: str, size: int) -> UselessAnswer:
    return UselessAnswer(
        f"{uri} has another size than the {size} bytes that the store reported: retry when its upload is complete"
    )
