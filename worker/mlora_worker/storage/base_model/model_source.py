"""The base model's folder: small files copied to a local cache folder, tensors by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import torch

from mlora_worker.protocol import HUB_ENDPOINT, ModelSource
from mlora_worker.storage import uri as address
from mlora_worker.storage.base_model.cached_weights import CachedWeights
from mlora_worker.storage.base_model.model_folder import HubFolder, ModelFolder, RemoteFolder, WebFolder
from mlora_worker.storage.base_model.model_names import (
    INDEX_FILE,
    LARGEST_INDEX,
    MOST_FILES,
    MOST_SMALL,
    SINGLE_FILE,
    is_gguf,
    is_pickle,
    is_small,
    largest,
)
from mlora_worker.storage.base_model.safetensors_reader import BrokenModel, SafetensorsReader
from mlora_worker.storage.base_model.weight_cache import WeightCache
from mlora_worker.storage.egress_policy import Destinations
from mlora_worker.storage.errors import ObjectNotFound, StoreUnreachable
from mlora_worker.storage.first_bytes import ENOUGH, named, stands_in
from mlora_worker.storage.object_store.file_store import replacing
from mlora_worker.storage.object_store.s3 import DEFAULT_TIMEOUTS, S3Timeouts
from mlora_worker.storage.object_store.store import Store
from mlora_worker.storage.remote.http import LONG_WAIT, WebFiles
from mlora_worker.storage.remote.hub import HubClient, model_address
from mlora_worker.storage.versioned_json import plain_json

_HUB = "hf://"
_WEB = ("http://", "https://")
_WHERE = "the Secret of storage.secretRef, or set another model.uri"


@dataclass(frozen=True, slots=True)
class RemoteAccess:
    """How models that lie in no store are read. ``hub_token`` is asked at each opening."""

    hub_endpoint: str = HUB_ENDPOINT
    hub_token: Callable[[], str | None] = lambda: None
    allowed_networks: Sequence[str] = ()
    cache_bytes: int = 0  # of weights that may be kept below the cache's folder; 0: none
    timeouts: S3Timeouts = DEFAULT_TIMEOUTS

    def web(self) -> WebFiles:
        return WebFiles(Destinations(self.allowed_networks), self.timeouts, longest_wait=LONG_WAIT)

    def hub(self, web: WebFiles) -> HubClient:
        return HubClient(web, self.hub_token(), self.hub_endpoint, _WHERE)


def pinned(source: ModelSource, remote: RemoteAccess) -> ModelSource:
    """``source`` with the commit that its revision stands for now; itself where it lies on no hub. Raises StorageError.

    One rank asks, and tells the others: a branch may move while they start.
    """
    if not source.uri.startswith(_HUB) or source.commit is not None:
        return source
    at = model_address(source.uri, source.revision)
    try:
        return source.model_copy(update={"commit": remote.hub(remote.web()).commit(at)})
    except ObjectNotFound as error:
        raise BrokenModel(str(error)) from None


def open_model(store: Store, source: ModelSource, cache_dir: Path, remote: RemoteAccess) -> ModelFiles:
    """The model of ``source``, which may lie in ``store``, on a hub or on a web server. Raises StorageError."""
    web = remote.web()
    folder: RemoteFolder
    if source.uri.startswith(_HUB):
        source = pinned(source, remote)
        assert source.commit is not None
        at = model_address(source.uri, source.revision)
        folder = HubFolder(remote.hub(web), web, at, source.commit, source.uri)
    elif source.uri.startswith(_WEB):
        folder = WebFolder(web, source.uri)
    else:
        return ModelFiles(store, source, cache_dir)
    cache = WeightCache(cache_dir / "weights", remote.cache_bytes) if remote.cache_bytes else None
    return ModelFiles(folder, source, cache_dir, CachedWeights(folder, cache))


class ModelFiles:
    """A model below ``source.uri``. Lists the folder once, reads headers when first asked for tensors.

    Raises StorageError: BrokenModel when the folder is no model that can be read, ObjectNotFound when it is
    not there. ``weights``: from where tensors are read, if not from ``store``.
    """

    def __init__(
        self,
        store: ModelFolder,
        source: ModelSource,
        cache_dir: Path,
        weights: CachedWeights | None = None,
    ) -> None:
        self._store = store
        self._weights = weights
        self.source = source  # with its commit, where it has one
        self._uri = source.uri
        self._cache_dir = cache_dir
        self._files = {address.name_below(source.uri, uri): uri for uri in store.list(source.uri, MOST_FILES)}
        if "config.json" not in self._files:
            self._refuse_gguf()
            found = ", ".join(sorted(self._files)[:10]) or "nothing"
            raise BrokenModel(f"{source.uri} does not contain a model: config.json is missing; found {found}")

    def folder(self) -> Path:
        """A local folder with the configuration and the tokenizer, for ``from_pretrained``; no weights are
        copied.

        The folder itself when it is local already. Else the files are fetched anew and those that the model has no
        more are removed, so that a model that was replaced is never mixed with an older one; each is renamed into
        place, so that ranks on one node may do it at the same time. Which folder depends on the address, the commit
        and what serves them: pipelines may share a cache, and an address means another model at another endpoint.
        """
        if address.is_file(self._uri):
            for name in filter(is_small, sorted(self._files)):
                size = self._store.size(self._files[name])
                _check_is_itself(
                    self._files[name], self._store.read_range(self._files[name], 0, min(ENOUGH, size))
                )
            return address.file_path(self._uri)
        which = " ".join(filter(None, (self._uri, self.source.commit, self._store.origin(self._uri))))
        folder = self._cache_dir / "models" / hashlib.sha256(which.encode()).hexdigest()[:16]
        small = sorted(filter(is_small, self._files))
        if len(small) > MOST_SMALL:
            raise BrokenModel(
                f"{self._uri} has {len(small)} files of a configuration and a tokenizer, more than {MOST_SMALL}: "
                f"remove those that do not belong to it"
            )
        for name in small:
            uri = self._files[name]
            data = self._store.read(uri, largest(name))
            if len(data) != self._store.size(uri):
                raise StoreUnreachable(
                    f"{uri} changed while it was being read: retry when its upload is complete"
                )
            _check_is_itself(uri, data[:ENOUGH])
            with replacing(folder / name) as file:
                file.write(data)
        for path in folder.iterdir():
            if is_small(path.name) and path.name not in self._files:
                path.unlink(missing_ok=True)
        return folder

    def names(self) -> set[str]:
        """Names of all tensors, such as ``model.layers.0.self_attn.q_proj.weight``. A tied head has none."""
        return self._reader.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(name)

    def tensor(self, name: str) -> torch.Tensor:
        """On the CPU, in the file's dtype; only its own bytes are read."""
        return self._reader.tensor(name)

    def prove(self) -> None:
        """Look at the weights that were read, where somebody says what they should be. Raises StoreUnreachable."""
        if self._weights is not None:
            self._weights.prove()

    @cached_property
    def _reader(self) -> SafetensorsReader:
        headers = self._store if self._weights is None else self._weights.headers
        return SafetensorsReader(headers, self._weight_files(), self._weights)

    def _weight_files(self) -> list[str]:
        if SINGLE_FILE in self._files:
            return [self._files[SINGLE_FILE]]
        if INDEX_FILE in self._files:
            return self._shards()
        pickles = sorted(filter(is_pickle, self._files))
        if pickles:
            raise BrokenModel(
                f"{self._uri} has its weights as pickle files ({pickles[0]}), which can run code and are not "
                f"supported. Convert them once with transformers:"
                " "
                'AutoModelForCausalLM.from_pretrained("FOLDER").save_pretrained("NEW_FOLDER")'
            )
        self._refuse_gguf()
        found = ", ".join(sorted(self._files)[:10])
        raise BrokenModel(f"{self._uri} has neither {SINGLE_FILE} nor {INDEX_FILE}; found {found}")

    def _refuse_gguf(self) -> None:
        for name in filter(is_gguf, sorted(self._files)):
            raise BrokenModel(
                f"{self._uri} has its weights as GGUF ({name}), which is not supported. Convert it once to "
                f"safetensors with transformers and from_pretrained(gguf_file=...), as the page Models of the "
                f"documentation shows"
            )

    def _shards(self) -> list[str]:
        try:
            index = plain_json(self._store.read(self._files[INDEX_FILE], LARGEST_INDEX))
            names = sorted(set(index["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrokenModel(
                f"{self._files[INDEX_FILE]} is not the index of a sharded model ({error})"
            ) from None
        # A web server's files are known by their names as they stand in an address.
        names = [name if name in self._files else quote(str(name)) for name in names]
        absent = [name for name in names if name not in self._files]
        if absent or not names:
            raise BrokenModel(
                f"{self._uri} is incomplete: {INDEX_FILE} names "
                + (f"{', '.join(map(str, absent[:5]))}, missing there" if absent else "no files")
            )
        return [self._files[name] for name in names]


def _check_is_itself(uri: str, start: bytes) -> None:
    """Raises BrokenModel where its first bytes are those of another file."""
    found = named(start) if uri.endswith((".json", ".txt", ".jinja")) else stands_in(start)
    if found is not None:
        raise BrokenModel(f"{uri} {found}")
