"""Files behind ``http://`` and ``https://`` addresses, read in pieces; a broken connection is taken up where it broke."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from mlora_worker import addresses
from mlora_worker.protocol import FailureReason, one_line, without_credentials
from mlora_worker.storage.busy import asked_seconds, busy
from mlora_worker.storage.egress_policy import Destinations
from mlora_worker.storage.errors import (
    AccessRefused,
    ObjectNotFound,
    StorageError,
    StoreUnreachable,
    TooLarge,
    UselessAnswer,
)
from mlora_worker.storage.limits import size_in
from mlora_worker.storage.object_store.s3 import DEFAULT_TIMEOUTS, PIECE, S3Timeouts
from mlora_worker.storage.wire import BadAnswer, watched

_MOST_REDIRECTS: Final = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 425, 429, 500, 502, 503, 504)  # another attempt may work
_PLAIN = {"Accept-Encoding": "identity", "User-Agent": "mlora-operator"}
_PAUSES = (0.5, 2.0, 5.0)
_BUSY = 429
# Seconds that a busy server is waited for on the spot. For one that asks for more, others come back later (``StoreBusy``),
# but where much would have to be done again: hubs count what they are asked in windows of five minutes.
SHORT_WAIT: Final = 60.0
LONG_WAIT: Final = 330.0
_FEW_ANSWERS = 20  # before which little is lost
_MOST_ASKED = 3600.0
_TOLD_FROM = 10.0  # seconds of a wait that the log tells

_PART = re.compile(
    r"bytes (?:([0-9]{1,16})-[0-9]{1,16}|\*)/([0-9]{1,16})"
)  # of a Content-Range header: first byte and the whole's size

Headers = Mapping[str, str]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resource:
    """What a server says of a file before it is read."""

    size: int | None
    etag: str | None  # a strong one: equal tags mean equal bytes
    ranges: bool  # parts can be asked for
    revision: str | None = None  # a hub's commit


class NoRanges(StorageError):
    """The server gives whole files only."""

    def __init__(self, url: str) -> None:
        super().__init__(FailureReason.INVALID_SPEC, f"{url}: the server does not support range requests")


class WebFiles:
    """Thread-safe. Requests go to the address that was checked, and to no proxy; each redirect is checked anew."""

    def __init__(
        self,
        destinations: Destinations,
        timeouts: S3Timeouts = DEFAULT_TIMEOUTS,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        longest_wait: float = SHORT_WAIT,
    ) -> None:
        """``longest_wait``: seconds that are waited for a busy server, though nothing is lost by ``StoreBusy``."""
        self._destinations = destinations
        self._timeouts = timeouts
        self._pause = pause
        self._connection = watched(HTTPConnection, clock)
        self._tls_connection = watched(HTTPSConnection, clock)
        self._now = now
        self._longest_wait = longest_wait
        self._answers = 0
        self._may_be_asked = (
            _MOST_ASKED  # seconds that servers may still ask us to wait, all of them together
        )

    def look(self, url: str, headers: Headers | None = None) -> Resource:
        """Without reading it. Raises StorageError."""
        with self._answer("HEAD", url, headers or {}) as answer:
            found = answer.headers
            etag = found.get("X-Linked-ETag") or found.get("ETag")
            size = found.get("X-Linked-Size") or found.get("Content-Length")
            return Resource(
                size=size_in(size),
                etag=etag if etag and not etag.startswith("W/") else None,
                ranges=found.get("Accept-Ranges", "").lower() == "bytes",
                revision=answer.first_headers.get("X-Repo-Commit"),
            )

    def read(self, url: str, headers: Headers | None = None, *, most: int) -> tuple[bytes, Headers]:
        """A small file and its headers. Raises TooLarge when it has more than ``most`` bytes."""
        with self._answer("GET", url, headers or {}) as answer:
            data = self._at_most(answer, url, most + 1)
            if len(data) > most:
                raise TooLarge(url, most)
            return data, answer.headers

    def read_range(self, url: str, start: int, length: int, headers: Headers | None = None) -> bytes:
        wanted = {**(headers or {}), "Range": f"bytes={start}-{start + length - 1}"}
        with self._answer("GET", url, wanted) as answer:
            if answer.status != 206:
                raise StorageError(
                    FailureReason.INVALID_SPEC,
                    f"{url}: the server does not support range requests, which Parquet needs: use JSON Lines or CSV, "
                    "or put the file into a store",
                )
            _check_begins(url, answer.headers, start)
            data = self._at_most(answer, url, length + 1)
        if len(data) != length:
            raise UselessAnswer(f"{url}: wanted {length} bytes from {start}, got {len(data)}")
        return data

    def probe(self, url: str, headers: Headers | None = None) -> Resource:
        """What ``look`` says, of servers that know GET alone, too. ``ranges`` is tried and not believed."""
        wanted = {**(headers or {}), "Range": "bytes=0-0"}
        with self._answer("GET", url, wanted, also=(416,)) as answer:
            part = _PART.fullmatch(answer.headers.get("Content-Range", ""))
            size = answer.headers.get("Content-Length") if answer.status == 200 else None
            if part is not None:
                size = part[2]
            return Resource(
                size=size_in(size),
                etag=_strong_tag(answer.headers),
                ranges=answer.status != 200,
            )

    def range_pieces(
        self, url: str, start: int, length: int, headers: Headers | None = None, *, expected: Resource
    ) -> Iterator[bytes]:
        """Exactly these bytes; a connection that breaks is taken up where it broke. Raises NoRanges; UselessAnswer when
        the file is not the ``expected`` one any more."""
        done = 0
        for attempt in range(self._timeouts.attempts):
            wanted = {**(headers or {}), "Range": f"bytes={start + done}-{start + length - 1}"}
            with self._answer("GET", url, wanted) as answer:
                if answer.status != 206:
                    raise NoRanges(url)
                _check_same(url, answer.headers, start + done, expected)
                with contextlib.suppress(HTTPError, OSError):
                    while done < length and (piece := answer.arrived(min(PIECE, length - done))):
                        done += len(piece)
                        yield piece
            if done == length:
                return
            self._pause(_PAUSES[min(attempt, len(_PAUSES) - 1)])
        raise StoreUnreachable(
            f"{url}: the connection was lost while reading, after {done} of {length} bytes"
        )

    def pieces(self, url: str, headers: Headers | None = None) -> Iterator[bytes]:
        """The whole file. After a break it goes on only where the server proves that the file is still the same."""
        done, tag = 0, None
        for attempt in range(self._timeouts.attempts):
            wanted = dict(headers or {})
            if done:
                if tag is None:
                    break
                wanted |= {"Range": f"bytes={done}-", "If-Range": tag}
            with self._answer("GET", url, wanted) as answer:
                if done and answer.status != 206:
                    raise UselessAnswer(f"{url} changed while it was being read: retry when it is complete")
                tag = _strong_tag(answer.headers)
                try:
                    while piece := answer.arrived(PIECE):
                        done += len(piece)
                        yield piece
                    return
                except (HTTPError, OSError):
                    self._pause(_PAUSES[min(attempt, len(_PAUSES) - 1)])
        raise StoreUnreachable(f"{url}: the connection was lost while reading, after {done} bytes")

    def _at_most(self, answer: _Answer, url: str, most: int) -> bytes:
        pieces, left = [], most
        try:
            while left and (piece := answer.arrived(left)):
                pieces.append(piece)
                left -= len(piece)
        except (HTTPError, OSError) as error:
            raise StoreUnreachable(
                f"{url}: the connection was lost while reading, after {most - left} bytes ({type(error).__name__})"
            ) from None
        return b"".join(pieces)

    @contextlib.contextmanager
    def _answer(
        self, method: str, url: str, headers: Headers, also: tuple[int, ...] = ()
    ) -> Iterator[_Answer]:
        """A good answer, or one with a status of ``also``, after redirects and repeated attempts. A server that is busy is
        given the time that it asks for, or StoreBusy is raised. Raises StoreUnreachable for one that is too slow, or sends
        without end."""
        try:
            with self._answered(method, url, headers, also) as answer:
                yield answer
        except BadAnswer as error:
            raise StoreUnreachable(f"{url}: the server {error}") from None

    @contextlib.contextmanager
    def _answered(self, method: str, url: str, headers: Headers, also: tuple[int, ...]) -> Iterator[_Answer]:
        for attempt in range(self._timeouts.attempts):
            last = attempt == self._timeouts.attempts - 1
            asked = 0.0
            try:
                answer = self._followed(method, url, headers)
            except HTTPError as error:
                if last:
                    raise _no_connection(url, error) from None
            else:
                if answer.status < 300 or answer.status in also:
                    self._answers += 1
                    try:
                        yield answer
                    finally:
                        answer.close()
                    return
                answer.close()
                if answer.status not in _PASSING:
                    raise _refusal(url, answer)
                asked = self._wait_asked(url, answer, last)
            self._pause(max(asked, _PAUSES[min(attempt, len(_PAUSES) - 1)]))

    def _wait_asked(self, url: str, answer: _Answer, last: bool) -> float:
        """Seconds to wait for a server that may answer then. Raises StoreBusy where they are too many, or this try was the
        ``last``."""
        asked = asked_seconds(answer.headers, self._now())
        most = self._longest_wait if self._answers < _FEW_ANSWERS else max(LONG_WAIT, self._longest_wait)
        if last or (asked or 0.0) > min(most, self._may_be_asked):
            if asked is None and answer.status != _BUSY:
                raise _refusal(url, answer)
            raise busy(f"cannot read {url}: the server answered {answer.status}", asked, self._now())
        if asked is not None and asked >= _TOLD_FROM:
            log.warning("%s: the server is busy and asks to be left alone for %.0f s", url, asked)
        self._may_be_asked -= asked or 0.0
        return asked or 0.0

    def _followed(self, method: str, url: str, headers: Headers) -> _Answer:
        at, sent, first = url, {**_PLAIN, **headers}, None
        for _ in range(_MOST_REDIRECTS + 1):
            try:
                answer = self._once(method, at, sent)
            except (HTTPError, StoreUnreachable, BadAnswer) as error:
                if _site(at).origin == _site(url).origin:
                    raise
                if isinstance(error, HTTPError):
                    raise _Elsewhere(_site(at).host, type(error).__name__) from None
                raise UselessAnswer(f"{url} leads on to {_site(at).host}: {error}") from None
            answer.elsewhere = _site(at).origin != _site(url).origin
            first = first if first is not None else answer.headers
            if answer.status not in _REDIRECTS or "Location" not in answer.headers:
                answer.first_headers = first
                return answer
            answer.close()
            target = _joined(at, answer.headers["Location"])
            scheme = target.partition(":")[0].lower()
            if scheme not in ("http", "https") or (_site(at).scheme == "https" and scheme == "http"):
                raise StorageError(
                    FailureReason.INVALID_SPEC,
                    f"{url} leads on to {one_line(scheme[:20])}:// which is not followed",
                )
            if _site(at).origin != _site(target).origin:
                sent = {name: value for name, value in sent.items() if name != "Authorization"}
            at = target
        raise StorageError(FailureReason.INVALID_SPEC, f"{url} redirects more than {_MOST_REDIRECTS} times")

    def _once(self, method: str, url: str, headers: Headers) -> _Answer:
        site = _site(url)
        host, port = site.host, site.port
        address = self._destinations.address_of(host, port, url)
        timeout = urllib3.Timeout(connect=self._timeouts.connect_seconds, read=self._timeouts.read_seconds)
        options: dict[str, Any] = {"port": port, "timeout": timeout, "retries": False, "maxsize": 1}
        pool: urllib3.HTTPConnectionPool
        if site.scheme == "https":
            pool = urllib3.HTTPSConnectionPool(address, server_hostname=host, assert_hostname=host, **options)
            pool.ConnectionCls = self._tls_connection
        else:
            pool = urllib3.HTTPConnectionPool(address, **options)
            pool.ConnectionCls = self._connection
        body = pool.request(
            method,
            site.target,
            headers={**headers, "Host": site.origin.partition("://")[2]},
            redirect=False,
            preload_content=False,
            decode_content=False,
        )
        return _Answer(pool, body)


class _Elsewhere(HTTPError):
    """No connection to the ``host`` that a redirect leads to."""

    def __init__(self, host: str, kind: str) -> None:
        super().__init__(host)
        self.host, self.kind = host, kind


class _Answer:
    def __init__(self, pool: urllib3.HTTPConnectionPool, body: Any) -> None:
        self._pool = pool
        self.body = body
        self.status: int = body.status
        self.headers: Headers = body.headers
        self.first_headers: Headers = body.headers  # of the first server, before redirects
        self.elsewhere = False  # it is of another server than the one that was asked

    def arrived(self, most: int) -> bytes:
        """What is here, at most so many bytes; empty at the end."""
        piece: bytes = self.body.read1(most)
        return piece

    def close(self) -> None:
        self.body.close()
        self._pool.close()


def _site(address: str) -> addresses.Site:
    """Raises StorageError where it is no address."""
    try:
        return addresses.web(address)
    except addresses.NotAnAddress:
        raise _no_address(address) from None


def _joined(at: str, location: str) -> str:
    try:
        return addresses.led_to(at, location)
    except addresses.NotAnAddress:
        raise _no_address(location) from None


def _no_address(text: str) -> StorageError:
    return StorageError(
        FailureReason.INVALID_SPEC, f"{without_credentials(text[:1024])} is not a supported address"
    )


def _no_connection(url: str, error: HTTPError) -> StorageError:
    if isinstance(error, _Elsewhere):
        return UselessAnswer(
            f"cannot read {url}: no connection to {error.host}, where it leads on to ({error.kind})"
        )
    return StoreUnreachable(f"cannot read {url}: no connection to {_site(url).host} ({type(error).__name__})")


def _refusal(url: str, answer: _Answer) -> StorageError:
    status = answer.status
    if status in (404, 410):
        return ObjectNotFound(FailureReason.DATASET_NOT_FOUND, f"{url} does not exist: correct the address")
    if status in (401, 403):
        return AccessRefused(f"cannot read {url}: the server answered {status}")
    about_itself = (
        status >= 500 or status in _PASSING
    ) and not answer.elsewhere  # and not about this address
    kind = StoreUnreachable if about_itself else UselessAnswer
    return kind(f"cannot read {url}: the server answered {status}")


def _strong_tag(headers: Headers) -> str | None:
    tag = headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else None


def _check_same(url: str, headers: Headers, start: int, expected: Resource) -> None:
    """Raises UselessAnswer unless a part begins at ``start`` and is of the ``expected`` file."""
    part = _PART.fullmatch(headers.get("Content-Range", ""))
    if part is None or part[1] != str(start):
        raise UselessAnswer(f"{url}: requested bytes from {start}, but the server sent others")
    tag = _strong_tag(headers)
    changed = expected.etag is not None and tag is not None and tag != expected.etag
    if changed or (expected.size is not None and int(part[2]) != expected.size):
        raise UselessAnswer(f"{url} changed while it was being read: retry when it is complete")


def _check_begins(url: str, headers: Headers, start: int) -> None:
    """Raises UselessAnswer where a part says that it begins elsewhere."""
    part = _PART.fullmatch(headers.get("Content-Range", ""))
    if part is not None and part[1] != str(start):
        raise UselessAnswer(f"{url}: requested bytes from {start}, but the server sent others")
