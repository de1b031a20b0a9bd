"""Where rows are read from: a task's store, the web, a hub. One interface over the three; nothing is ever written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn, Protocol

from mlora_worker.protocol import HUB_ENDPOINT, FailureReason, StorageAccess, without_credentials
from mlora_worker.storage import uri as address
from mlora_worker.storage.egress_policy import Destinations
from mlora_worker.storage.errors import (
    AccessRefused,
    ObjectNotFound,
    StorageError,
    StoreBusy,
    StoreUnreachable,
    UselessAnswer,
)
from mlora_worker.storage.limits import MOST_LISTED
from mlora_worker.storage.object_store.s3 import DEFAULT_TIMEOUTS, S3Timeouts
from mlora_worker.storage.object_store.store import Store
from mlora_worker.storage.remote.globs import fixed_folder, is_data_file, is_pattern, matches, of_split
from mlora_worker.storage.remote.http import WebFiles
from mlora_worker.storage.remote.hub import HubClient, hub_address

MOST_FILES = 10_000  # of one data set


class DatasetSource(Protocol):
    """What the preparing of rows needs. Every method raises ``StorageError``."""

    def find(self, uri: str, split: str | None) -> list[str]:
        """The files that an address stands for, in the order in which they are read."""
        ...

    def version(self, uri: str) -> str | None:
        """Two equal answers mean the same bytes; None where nobody says. It is given only to those who may read."""
        ...

    def pieces(self, uri: str) -> Iterator[bytes]: ...

    def size(self, uri: str) -> int: ...

    def read_range(self, uri: str, start: int, length: int) -> bytes: ...


def open_sources(
    store: Store,
    access: StorageAccess,
    *,
    allowed_networks: Sequence[str] = (),
    hub_endpoint: str = HUB_ENDPOINT,
    timeouts: S3Timeouts = DEFAULT_TIMEOUTS,
) -> DatasetSource:
    """The sources of one task: ``store`` is its own, ``access`` has its hub token."""
    web = WebFiles(Destinations(allowed_networks), timeouts)
    token = access.hub_token.get_secret_value().strip() if access.hub_token is not None else None
    return _Sources(store, web, HubClient(web, token or None, hub_endpoint))


class _Sources:
    def __init__(self, store: Store, web: WebFiles, hub: HubClient) -> None:
        self._store = store
        self._web = web
        self._hub = hub

    def find(self, uri: str, split: str | None) -> list[str]:
        kind = _kind(uri)
        if kind == "hf":
            return self._find_on_hub(uri, split)
        if kind == "web" or not is_pattern(uri):
            return [uri] if split is None or of_split([_path_of(uri, kind)], split) else _none(uri, split)
        folder = fixed_folder(uri)
        if kind == address.S3 and folder.count("/") < 2:
            raise StorageError(FailureReason.INVALID_SPEC, f"{uri!r}: a bucket's name must not contain *")
        pattern = address.file_pattern(uri) if kind == address.FILE else uri
        found = [one for one in self._store.list(folder, MOST_LISTED) if matches(pattern, one)]
        if split is not None:
            found = [one for one in found if of_split([_path_of(one, kind)], split)]
        return _some(found, uri, split)

    def version(self, uri: str) -> str | None:
        kind = _kind(uri)
        if kind in (address.S3, address.FILE):
            return self._store.version(uri)
        try:
            found = self._web.look(*self._request(uri, kind))
        except (AccessRefused, StoreUnreachable) as error:
            if kind != "web" or isinstance(error, StoreBusy):
                raise
            return None  # it may know GET alone, as an address that is signed for it does
        if kind == "hf":  # a commit never changes what it holds
            return f"{uri} {found.etag or ''}"
        return f"{found.etag} {found.size}" if found.etag is not None else None

    def pieces(self, uri: str) -> Iterator[bytes]:
        kind = _kind(uri)
        if kind in (address.S3, address.FILE):
            return self._store.pieces(uri)
        return self._web.pieces(*self._request(uri, kind))

    def size(self, uri: str) -> int:
        kind = _kind(uri)
        if kind in (address.S3, address.FILE):
            return self._store.size(uri)
        size = self._web.look(*self._request(uri, kind)).size
        if size is None:
            raise UselessAnswer(f"cannot read {uri}: the server does not report its size")
        return size

    def read_range(self, uri: str, start: int, length: int) -> bytes:
        kind = _kind(uri)
        if kind in (address.S3, address.FILE):
            return self._store.read_range(uri, start, length)
        if length == 0:
            return b""
        url, headers = self._request(uri, kind)
        return self._web.read_range(url, start, length, headers)

    def _request(self, uri: str, kind: str) -> tuple[str, dict[str, str]]:
        return (self._hub.url(uri), dict(self._hub.headers)) if kind == "hf" else (uri, {})

    def _find_on_hub(self, uri: str, split: str | None) -> list[str]:
        at = hub_address(uri)
        commit = self._hub.commit(at)
        if at.path and not is_pattern(at.path) and is_data_file(at.path):
            named = [at.path] if split is None else of_split([at.path], split)
            return [at.at(commit, path) for path in named] or _none(uri, split)
        files = [path for path in self._hub.files(at, commit) if is_data_file(path)]
        if is_pattern(at.path):
            files = [path for path in files if matches(at.path, path)]
        elif at.path:
            files = [path for path in files if path.startswith(f"{at.path}/")]
        if split is not None:
            files = of_split(files, split)
        elif len(files) > 1 and not is_pattern(at.path):
            raise StorageError(
                FailureReason.INVALID_SPEC,
                f"{uri} has {len(files)} files of rows ({', '.join(files[:5])}...): choose some with dataset.split, "
                f"or put their names into the address",
            )
        return _some([at.at(commit, path) for path in files], uri, split)


def _some(found: list[str], uri: str, split: str | None) -> list[str]:
    if not found:
        return _none(uri, split)
    if len(found) > MOST_FILES:
        raise StorageError(
            FailureReason.INVALID_SPEC, f"{uri} matches {len(found)} files, more than {MOST_FILES}"
        )
    return found


def _none(uri: str, split: str | None) -> NoReturn:
    message = f"no file matches {without_credentials(uri)}"
    if split is not None:
        message = (
            f"no file of split {split} matches {without_credentials(uri)}: the path of such a file contains that "
            f"word: correct the address, or remove dataset.split"
        )
    raise ObjectNotFound(FailureReason.DATASET_NOT_FOUND, message)


def _path_of(uri: str, kind: str) -> str:
    """Without bucket, host and query, whose words say nothing of a file."""
    path = uri.partition("://")[2].partition("/")[2]
    return path.partition("?")[0].partition("#")[0] if kind == "web" else path


def _kind(uri: str) -> str:
    if uri.startswith("hf://"):
        return "hf"
    return "web" if uri.startswith(("http://", "https://")) else address.scheme(uri)
