"""Large tensors that nobody computes with now, kept beside the memory that tasks train in.

A task that leaves, returns, is saved or takes a checkpoint brings copies of what it has learnt: for a checkpoint three
times its adapter. They wait for links and stores, as long as those take, and a memory budget on a CPU
(``pipeline/budget.py``) counts them, while the operator's memory model knows only of tasks that train. So where there is a
budget they lie in files without a name on this rank's volume, mapped and shared: the kernel counts no such page as the
process's own, and the file vanishes with the last tensor that is in it, whatever becomes of the process.

Where the volume has no room they are in memory after all. ``held`` says how much that is, and it is told to the operator.
"""

from __future__ import annotations

import json
import logging
import mmap
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.object_store.scratch import remove_abandoned, save_tensors, scratch_folder

log = logging.getLogger(__name__)

_SMALL = 2**16  # bytes: what is less is not worth a file
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8,
}  # fmt: skip

Buffer = bytes | bytearray | memoryview | mmap.mmap


class Aside:
    """``folder``: where the files lie; None: all is in memory, which nobody counts. Thread-safe."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._lock = threading.RLock()  # a finalizer may come to whoever holds it
        self._held = 0

    @property
    def folder(self) -> Path | None:
        """Made, where there is one. None also where it cannot be made."""
        if self._folder is None:
            return None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._say(error)
            return None
        return self._folder

    @property
    def is_counted(self) -> bool:
        """The process has a budget, which counts all that it has in memory."""
        return self._folder is not None

    @property
    def held(self) -> int:
        """Bytes in memory that would be in files if there were room for them."""
        return self._held

    def clean(self) -> None:
        """Once, at the start: remove what killed processes have left."""
        if self._folder is not None:
            remove_abandoned(self._folder)

    def copy(self, tensor: Tensor) -> Tensor:
        """On the CPU. Raises MemoryError where neither the volume nor the memory has room."""
        if self._folder is None or tensor.nbytes < _SMALL or tensor.device.type != "cpu":
            return tensor.to("cpu", copy=True)
        flat = tensor.detach().contiguous().view(-1)
        # Written, not copied into a mapping: a volume without room says so here, and would end the process there.
        made = self._file(flat.view(torch.uint8).numpy().data)
        if made is None:
            made = self._memory(tensor.nbytes)
            torch.frombuffer(made, dtype=flat.dtype).copy_(flat)
        return torch.frombuffer(made, dtype=flat.dtype).view(tensor.shape)

    def buffer(self, size: int) -> memoryview:
        """Of zeros, to be filled: what comes over a link. Raises MemoryError as ``copy`` does."""
        if self._folder is None or size < _SMALL:
            return memoryview(bytearray(size))
        made = self._zeros(size)
        return memoryview(self._memory(size) if made is None else made)

    def packed(self, tensors: Mapping[str, Tensor]) -> bytes | mmap.mmap:
        """As safetensors, to be sent. Raises MemoryError as ``copy`` does."""
        if self._folder is not None and sum(tensor.nbytes for tensor in tensors.values()) >= _SMALL:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with scratch_folder(self._folder, "state") as folder:
                    return mapped(save_tensors(tensors, folder / "part.safetensors", "state"))
            except (StorageError, OSError) as error:
                self._say(error)
        packed: bytes = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        return packed

    def payload(self, tensors: Mapping[str, Tensor]) -> bytes | memoryview:
        """``packed``, for a link."""
        packed = self.packed(tensors)
        return memoryview(packed) if isinstance(packed, mmap.mmap) else packed

    def put_bytes(self, data: bytes | memoryview) -> bytes | memoryview:
        """The same bytes, which are in memory."""
        if self._folder is None or len(data) < _SMALL:
            return data
        made = self.buffer(len(data))
        made[:] = data
        return made

    def put(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The same tensors, which were made in memory."""
        if self._folder is None or sum(tensor.nbytes for tensor in tensors.values()) < _SMALL:
            return tensors
        packed = self.packed(tensors)
        return tensors_in(packed) if isinstance(packed, mmap.mmap) else tensors

    def _file(self, data: memoryview) -> mmap.mmap | None:
        try:
            with self._nameless() as file:
                file.write(data)
                file.flush()
                return mmap.mmap(file.fileno(), len(data))
        except OSError as error:
            self._say(error)
            return None

    def _zeros(self, size: int) -> mmap.mmap | None:
        piece = bytes(min(size, 2**20))
        try:
            with self._nameless() as file:
                for start in range(
                    0, size, len(piece)
                ):  # a hole would be filled when it is too late to refuse
                    file.write(piece[: size - start])
                file.flush()
                return mmap.mmap(file.fileno(), size)
        except OSError as error:
            self._say(error)
            return None

    def _nameless(self) -> BinaryIO:
        assert self._folder is not None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=self._folder)

    def _memory(self, size: int) -> mmap.mmap:
        """A mapping of its own, which goes back to the kernel as a whole."""
        try:
            made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            raise MemoryError(f"no memory for {size} bytes that a task leaves behind") from None
        self._count(size)
        weakref.finalize(made, self._count, -size)
        return made

    def _count(self, size: int) -> None:
        with self._lock:
            self._held += size

    def _say(self, error: Exception) -> None:
        # Its words alone: frames hang on an error, and on these what is to be let go of.
        log.warning(
            "what tasks leave behind is in memory, since %s takes no file: %s", self._folder, str(error)
        )


def mapped(path: Path) -> mmap.mmap:
    """The file's bytes, for as long as anybody holds them: also once it is removed. Raises OSError."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Of a safetensors file from outside, as views of the mapped file. Raises OSError, SafetensorError."""
    with safe_open(str(path), framework="np"):  # proves that what its header says is in it
        pass
    return tensors_in(mapped(path))


def tensors_in(buffer: Buffer) -> dict[str, Tensor]:
    """The tensors of ``buffer``, which is whole and was written by this project, as views of it; what cannot be written to
    is copied. Raises SafetensorError for a type of numbers that no state has."""
    if isinstance(buffer, bytes):
        buffer = bytearray(buffer)
    start = 8 + int.from_bytes(buffer[:8], "little")
    found = {}
    for name, entry in json.loads(bytes(buffer[8:start])).items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise SafetensorError(f"{name} has numbers of type {entry['dtype']}")
        first, last = entry["data_offsets"]
        count = (last - first) // dtype.itemsize
        found[name] = (
            torch.frombuffer(buffer, dtype=dtype, count=count, offset=start + first).view(entry["shape"])
            if count
            else torch.empty(entry["shape"], dtype=dtype)
        )
    return found
