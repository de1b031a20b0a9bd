"""A base model's folder, wherever it lies: a store, a hub, a web server. Nothing is ever written there."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol
from urllib.parse import quote

from mlora_worker.protocol import HUB_ENDPOINT
from mlora_worker.storage.base_model.model_names import (
    INDEX_FILE,
    LARGEST_INDEX,
    PROBED_FILES,
    PROBED_PICKLES,
    SINGLE_FILE,
)
from mlora_worker.storage.base_model.safetensors_reader import BrokenModel
from mlora_worker.storage.errors import AccessRefused, ObjectNotFound, StoreUnreachable
from mlora_worker.storage.remote.http import NoRanges, Resource, WebFiles
from mlora_worker.storage.remote.hub import HubClient, HubFile, RepositoryPath
from mlora_worker.storage.uri import normal_endpoint
from mlora_worker.storage.versioned_json import plain_json


class ModelFolder(Protocol):
    """Every method raises ``StorageError``. Addresses are those that ``list`` gives."""

    def list(self, prefix: str, most: int) -> list[str]: ...

    def read(self, uri: str, most: int) -> bytes: ...

    def size(self, uri: str) -> int: ...

    def read_range(self, uri: str, start: int, length: int) -> bytes: ...

    def origin(self, uri: str) -> str:
        """What serves ``uri``, where that alone does not say; empty for the public hub, too."""
        ...


class RemoteFolder(ModelFolder, Protocol):
    """One whose files can be kept on the worker's volume."""

    def identity(self, uri: str) -> str | None:
        """Equal ones mean equal bytes, whoever asks; None where nobody says."""
        ...

    def sha256(self, uri: str) -> str | None:
        """Of the whole file, where it is known."""
        ...

    def parts(self, uri: str, start: int, length: int) -> Iterator[bytes]:
        """Exactly these bytes. Raises NoRanges."""
        ...

    def whole(self, uri: str) -> Iterator[bytes]: ...


class HubFolder:
    """A model of a hub, at one commit. Thread-safe."""

    def __init__(self, hub: HubClient, web: WebFiles, at: RepositoryPath, commit: str, uri: str) -> None:
        """Lists the repository. Raises StorageError. ``uri`` is how users name the folder."""
        self._hub, self._web, self._at, self._commit, self._uri = hub, web, at, commit, uri.rstrip("/")
        below = f"{at.path}/" if at.path else ""
        self._files: dict[str, HubFile] = {
            f"{self._uri}/{file.path.removeprefix(below)}": file
            for file in hub.entries(at, commit)
            if file.path.startswith(below)
        }

    def list(self, prefix: str, most: int) -> list[str]:
        del prefix, most  # there is one folder, which was listed
        return sorted(self._files)

    def size(self, uri: str) -> int:
        size = self._files[uri].size
        if size is None:
            raise StoreUnreachable(f"{uri}: the hub does not report its size")
        return size

    def read(self, uri: str, most: int) -> bytes:
        """Verified as far as the hub says what it should be."""
        data, _ = self._web.read(self._url(uri), self._hub.headers, most=most)
        file = self._files[uri]
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        if file.sha256 not in (None, hashlib.sha256(data).hexdigest()) or file.git_blob not in (None, blob):
            raise StoreUnreachable(f"{uri} does not match the hub's file at commit {self._commit}")
        return data

    def read_range(self, uri: str, start: int, length: int) -> bytes:
        return b"".join(self.parts(uri, start, length)) if length else b""

    def origin(self, uri: str) -> str:
        del uri
        served_by = normal_endpoint(self._hub.endpoint)
        return "" if served_by == HUB_ENDPOINT else served_by

    def identity(self, uri: str) -> str | None:
        digest = self._files[uri].sha256
        return f"{self._hub.endpoint} {digest}" if digest is not None else self._url(uri)

    def sha256(self, uri: str) -> str | None:
        return self._files[uri].sha256

    def parts(self, uri: str, start: int, length: int) -> Iterator[bytes]:
        """A commit's file never changes, but what serves it has tags of its own: its size is what is compared."""
        expected = Resource(size=self._files[uri].size, etag=None, ranges=True)
        return self._web.range_pieces(self._url(uri), start, length, self._hub.headers, expected=expected)

    def whole(self, uri: str) -> Iterator[bytes]:
        return self._web.pieces(self._url(uri), self._hub.headers)

    def _url(self, uri: str) -> str:
        at = RepositoryPath(self._at.owner, self._at.name, self._commit, self._files[uri].path, "models")
        return self._hub.url_of(at)


class WebFolder:
    """A folder on a web server. Servers list nothing, so the files that a model may have are asked for by name.
    Thread-safe."""

    def __init__(self, web: WebFiles, uri: str) -> None:
        self._web, self._uri = web, uri.rstrip("/")
        self._found: dict[str, Resource] = {}
        self._lock = threading.Lock()

    def list(self, prefix: str, most: int) -> list[str]:
        del prefix
        self._look_for("config.json", optional=False)
        for name in PROBED_FILES:
            self._look_for(name)
        if self._at(INDEX_FILE) in self._found and self._at(SINGLE_FILE) not in self._found:
            for name in _shards(self.read(self._at(INDEX_FILE), LARGEST_INDEX), most):
                self._look_for(name)
        elif self._at(SINGLE_FILE) not in self._found:
            for name in PROBED_PICKLES:
                self._look_for(name)
        return sorted(self._found)

    def size(self, uri: str) -> int:
        size = self._found[uri].size
        if size is None:
            raise StoreUnreachable(f"cannot read {uri}: the server does not report its size")
        return size

    def read(self, uri: str, most: int) -> bytes:
        return self._web.read(uri, most=most)[0]

    def read_range(self, uri: str, start: int, length: int) -> bytes:
        return b"".join(self.parts(uri, start, length)) if length else b""

    def origin(self, uri: str) -> str:
        del uri
        return ""

    def identity(self, uri: str) -> str | None:
        tag = self._found[uri].etag
        return f"{uri} {tag}" if tag is not None else None

    def sha256(self, uri: str) -> str | None:
        del uri  # no server says
        return None

    def parts(self, uri: str, start: int, length: int) -> Iterator[bytes]:
        found = self._found[uri]
        if not found.ranges:
            raise NoRanges(uri)
        return self._web.range_pieces(uri, start, length, expected=found)

    def whole(self, uri: str) -> Iterator[bytes]:
        return self._web.pieces(uri)

    def _at(self, name: str) -> str:
        return f"{self._uri}/{quote(name)}"

    def _look_for(self, name: str, *, optional: bool = True) -> None:
        """Stores answer 403 for what is not there to those who may not list."""
        url = self._at(name)
        try:
            self._found[url] = self._web.probe(url)
        except ObjectNotFound:
            return
        except AccessRefused:
            if not optional:
                raise


def _shards(index: bytes, most: int) -> list[str]:
    """Names of the index, which ``ModelFiles`` judges; none that leads out of the folder."""
    try:
        weight_map: Mapping[str, str] = plain_json(index)["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    if len(names) > most:
        raise BrokenModel(f"{INDEX_FILE} names more than {most} files")
    if any(not isinstance(name, str) or ".." in name.split("/") or "://" in name for name in names):
        raise BrokenModel(f"{INDEX_FILE} names files outside of its folder")
    return names
