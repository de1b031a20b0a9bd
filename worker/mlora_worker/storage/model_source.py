"""The base model's folder: small files copied to a local cache folder, tensors by name."""

from __future__ import annotations

import hashlib
import json
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import torch

from mlora_worker.protocol import ModelSource
from mlora_worker.storage import uri as address
from mlora_worker.storage.files import replacing
from mlora_worker.storage.safetensors_reader import BrokenModel, SafetensorsReader
from mlora_worker.storage.store import Store

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# What configuration and tokenizer are made of; weights are never copied.
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens*",
    "added_tokens*",
    "chat_template*",
    "vocab*",
    "merges*",
    "*.model",
)
_PICKLES = ("*.bin", "*.pt", "*.pth")


class ModelFiles:
    """A model below ``source.uri``. Lists the folder once, reads headers when first asked for tensors.

    Raises StorageError: BrokenModel when the folder is no model that can be read, ObjectNotFound when it is
    not there.
    """

    def __init__(self, store: Store, source: ModelSource, cache_dir: Path) -> None:
        self._store = store
        self._uri = source.uri
        self._cache_dir = cache_dir
        self._files = {address.name_below(source.uri, uri): uri for uri in store.list(source.uri)}
        if "config.json" not in self._files:
            found = ", ".join(sorted(self._files)[:10]) or "nothing"
            raise BrokenModel(f"{source.uri} holds no model: config.json is missing; found {found}")

    def folder(self) -> Path:
        """A local folder with the configuration and the tokenizer, for ``from_pretrained``; no weights are
        copied.

        The folder itself when it is local already. Else the files are fetched anew, so that a model that was
        replaced is never mixed with an older one; each is renamed into place, so that ranks on one node may
        do it at the same time.
        """
        if address.scheme(self._uri) == address.FILE:
            return address.file_path(self._uri)
        folder = self._cache_dir / "models" / hashlib.sha256(self._uri.encode()).hexdigest()[:16]
        for name, uri in sorted(self._files.items()):
            if any(fnmatchcase(name, pattern) for pattern in _SMALL_FILES) and "/" not in name:
                data = self._store.read(uri)
                if len(data) != self._store.size(uri):
                    raise BrokenModel(
                        f"{uri} changed while it was read: start again when its upload has ended"
                    )
                with replacing(folder / name) as file:
                    file.write(data)
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

    @cached_property
    def _reader(self) -> SafetensorsReader:
        return SafetensorsReader(self._store, self._weight_files())

    def _weight_files(self) -> list[str]:
        if SINGLE_FILE in self._files:
            return [self._files[SINGLE_FILE]]
        if INDEX_FILE in self._files:
            return self._shards()
        pickles = sorted(
            name for name in self._files if any(fnmatchcase(name, pattern) for pattern in _PICKLES)
        )
        if pickles:
            raise BrokenModel(
                f"{self._uri} has its weights as pickle files ({pickles[0]}), which can run code and are not "
                "read; convert them once, with transformers: "
                'AutoModelForCausalLM.from_pretrained("FOLDER").save_pretrained("NEW_FOLDER")'
            )
        found = ", ".join(sorted(self._files)[:10])
        raise BrokenModel(f"{self._uri} has neither {SINGLE_FILE} nor {INDEX_FILE}; found {found}")

    def _shards(self) -> list[str]:
        try:
            names = sorted(set(json.loads(self._store.read(self._files[INDEX_FILE]))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrokenModel(f"{self._files[INDEX_FILE]} is no index of a sharded model ({error})") from None
        absent = [name for name in names if name not in self._files]
        if absent or not names:
            raise BrokenModel(
                f"{self._uri} is incomplete: {INDEX_FILE} names "
                + (f"{', '.join(map(str, absent[:5]))}, missing there" if absent else "no files")
            )
        return [self._files[name] for name in names]
