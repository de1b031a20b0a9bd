"""Weights of a remote model, read through the cache on the worker's volume where they have room there."""

from __future__ import annotations

import logging
import threading
from functools import partial

from mlora_worker.storage.base_model.model_folder import RemoteFolder
from mlora_worker.storage.base_model.safetensors_reader import BrokenModel
from mlora_worker.storage.base_model.weight_cache import CachedFile, CacheFull, WeightCache
from mlora_worker.storage.errors import StoreUnreachable
from mlora_worker.storage.remote.http import NoRanges

log = logging.getLogger(__name__)

# A file of which no more than this part is missing at the end is fetched whole: then its SHA-256 can be looked at.
_COMPLETED_PART = 1 / 8


class CachedWeights:
    """Thread-safe. Parts of files are asked for, and a whole file once where its server gives no parts."""

    def __init__(self, folder: RemoteFolder, cache: WeightCache | None) -> None:
        self.headers = _Headers(folder, self)
        self._folder = folder
        self._cache = cache
        self._copies: dict[str, CachedFile | None] = {}
        self._whole: set[str] = set()  # that this process has fetched in one piece
        self._lock = threading.Lock()

    def size(self, uri: str) -> int:
        return self._folder.size(uri)

    def read_range(self, uri: str, start: int, length: int) -> bytes:
        """Raises StorageError."""
        if not length:
            return b""
        copy = self._copy(uri)
        if copy is not None:
            try:
                return self._read(uri, copy, start, length)
            except CacheFull as error:
                log.warning("%s is not cached because the cache volume is full: %s", uri, error)
                with self._lock:
                    self._copies[uri] = None
        try:
            return self._folder.read_range(uri, start, length)
        except NoRanges as error:
            raise BrokenModel(
                f"{error}, and the worker's cache is too small for the whole file: use a larger volume at /cache, "
                f"raise worker.modelCache, or put the model into a store"
            ) from None

    def prove(self) -> None:
        """Where the SHA-256 of a file is known and the file is here whole, or nearly so, look whether it is the one.

        Raises StoreUnreachable, for what is fetched anew may be right, and what fetching raises.
        """
        for uri, copy in self._copies.items():
            expected = self._folder.sha256(uri)
            if copy is None or expected is None or copy.is_known(expected):
                continue
            if copy.missing > copy.blocks * _COMPLETED_PART:
                log.info(
                    "%s: %d of %d blocks are not cached, so its SHA-256 is not verified",
                    uri,
                    copy.missing,
                    copy.blocks,
                )
                continue
            try:
                copy.fill(partial(self._folder.parts, uri))
            except CacheFull:
                continue
            if not copy.matches(expected):
                copy.forget()
                raise StoreUnreachable(
                    f"{uri} does not match the SHA-256 of its hub ({expected}); its cached blocks are removed, and a "
                    f"restart downloads it again"
                )

    def _read(self, uri: str, copy: CachedFile, start: int, length: int) -> bytes:
        fetch = partial(self._folder.parts, uri)
        try:
            return copy.read(start, length, fetch)
        except NoRanges:
            with self._lock:
                if uri not in self._whole:  # also where a block that is here turned out to be damaged
                    copy.take_whole(self._folder.whole(uri))
                    self._whole.add(uri)
            return copy.read(start, length, fetch)

    def _copy(self, uri: str) -> CachedFile | None:
        with self._lock:
            if uri not in self._copies:
                identity = self._folder.identity(uri) if self._cache is not None else None
                copy = None
                if self._cache is not None and identity is not None:
                    copy = self._cache.open(identity, self._folder.size(uri))
                    if copy is None:
                        log.warning("%s is not cached because the worker's cache is full", uri)
                self._copies[uri] = copy
            return self._copies[uri]


class _Headers:
    """Small parts, which are read as they are: a block for each would be much more."""

    def __init__(self, folder: RemoteFolder, weights: CachedWeights) -> None:
        self._folder, self._weights = folder, weights

    def size(self, uri: str) -> int:
        return self._folder.size(uri)

    def read_range(self, uri: str, start: int, length: int) -> bytes:
        try:
            return self._folder.read_range(uri, start, length)
        except NoRanges:
            return self._weights.read_range(uri, start, length)
