"""Tensors of a safetensors model by name, each read on its own, so that a rank reads only its own layers.

Format (safetensors specification): 8 bytes little-endian length of the header, the header as JSON, then the
tensors' bytes; ``data_offsets`` count from the end of the header.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open

from mlora_worker.protocol import FailureReason
from mlora_worker.storage import uri as address
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.first_bytes import ENOUGH, named
from mlora_worker.storage.versioned_json import plain_json

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LENGTH_BYTES = 8
_LONGEST_HEADER = 32 * 2**20  # of a hundred thousand tensors; in memory it takes many times that
_MOST_SIDES = 8
_PIECE = 16 * 2**20
_PIECES_AT_ONCE = 4


class BrokenModel(StorageError):
    """The model's files cannot be what they should be."""

    def __init__(self, message: str) -> None:
        super().__init__(FailureReason.INVALID_SPEC, message)


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies."""

    uri: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # from the start of the file
    length: int


class Ranges(Protocol):
    """What is read from. Methods raise StorageError."""

    def size(self, uri: str) -> int: ...

    def read_range(self, uri: str, start: int, length: int) -> bytes: ...


class SafetensorsReader:
    """Reads the headers of all ``uris`` at once, and nothing else. Thread-safe. ``tensors``: from where these are read, if
    not as the headers."""

    def __init__(self, store: Ranges, uris: Iterable[str], tensors: Ranges | None = None) -> None:
        self._store = tensors or store
        self._entries: dict[str, TensorEntry] = {}
        for uri in uris:
            for name, entry in read_header(store, uri).items():
                if name in self._entries:
                    raise BrokenModel(
                        f"tensor {name} is in both {self._entries[name].uri} and {uri}: remove one of them"
                    )
                self._entries[name] = entry

    def names(self) -> set[str]:
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).dtype

    def tensor(self, name: str) -> torch.Tensor:
        """On the CPU, in the file's dtype. Of a local file, it is a view of the mapped file: nothing is
        copied.
        """
        entry = self._entry(name)
        if address.is_file(entry.uri):
            with safe_open(address.file_path(entry.uri), framework="pt") as file:
                found: torch.Tensor = file.get_tensor(name)
                return found
        buffer = torch.empty(entry.length, dtype=torch.uint8)
        target = buffer.numpy()  # pieces land in place: one tensor and a few pieces are held

        def fetch(offset: int) -> None:
            length = min(_PIECE, entry.length - offset)
            piece = self._store.read_range(entry.uri, entry.start + offset, length)
            target[offset : offset + length] = np.frombuffer(piece, np.uint8)

        offsets = range(0, entry.length, _PIECE)
        if len(offsets) == 1:
            fetch(0)
        else:
            with ThreadPoolExecutor(_PIECES_AT_ONCE) as pool:
                for _ in pool.map(fetch, offsets):
                    pass
        return buffer.view(entry.dtype).reshape(entry.shape)

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self._entries[name]
        except KeyError:
            raise BrokenModel(f"the model has no tensor {name}; it has {len(self._entries)} others") from None


def read_header(store: Ranges, uri: str) -> dict[str, TensorEntry]:
    """Where each tensor of one file lies. Raises BrokenModel when header, shapes and the file's size do not
    agree.
    """
    size = store.size(uri)
    try:
        return _header(store, uri, size)
    except BrokenModel as error:
        found = named(store.read_range(uri, 0, min(ENOUGH, size)))
        if found is not None:
            raise BrokenModel(f"{uri} {found}") from None
        raise error from None


def _header(store: Ranges, uri: str, size: int) -> dict[str, TensorEntry]:
    if size < _LENGTH_BYTES:
        raise BrokenModel(f"{uri} has {size} bytes and is not a safetensors file: upload it again")
    length = int.from_bytes(store.read_range(uri, 0, _LENGTH_BYTES), "little")
    if length > _LONGEST_HEADER:
        raise BrokenModel(
            f"{uri} is not a safetensors file: its first bytes are not the length of a header, which has at most "
            f"{_LONGEST_HEADER / 2**20:g} MiB"
        )
    data_start = _LENGTH_BYTES + length
    if data_start > size:
        raise BrokenModel(
            f"{uri} is truncated: its header alone needs {data_start} bytes, it has {size}; upload it again"
        )
    try:
        header = plain_json(store.read_range(uri, _LENGTH_BYTES, length))
        entries = {
            name: _entry_of(uri, data_start, value)
            for name, value in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenModel(
            f"{uri} has no valid safetensors header ({error}): save or upload it again"
        ) from None
    end = max((entry.start + entry.length for entry in entries.values()), default=data_start)
    if end > size:
        raise BrokenModel(f"{uri} is truncated: its tensors need {end} bytes, it has {size}; upload it again")
    return entries


def _entry_of(uri: str, data_start: int, value: dict[str, Any]) -> TensorEntry:
    dtype = _DTYPES[value["dtype"]]
    shape = tuple(value["shape"])
    begin, end = value["data_offsets"]
    if len(shape) > _MOST_SIDES:
        raise ValueError(f"a tensor has {len(shape)} sides")
    if not all(type(number) is int for number in (*shape, begin, end)):
        raise TypeError("sides and offsets of tensors are whole numbers")
    if min(shape, default=0) < 0 or begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"a tensor of shape {list(shape)} and type {value['dtype']} cannot have {end - begin} bytes"
        )
    return TensorEntry(uri, dtype, shape, data_start + begin, end - begin)
