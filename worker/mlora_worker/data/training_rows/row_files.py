"""Tokenised rows on disk, as arrays that are mapped into memory.

A folder holds, for n rows of t tokens together, all little-endian:
``ids.i4``         [t]  the tokens
``learnt.u1``      [t]  1 where the model shall learn to write that token
``ends.i8``        [n]  where each row ends in the two above
``supervised.i4``  [n]  labels of each row
``weights.f8``     [n]  weight of each row; a folder without it has all 1
``splits.i4``      [n]  tokens of the first of a row's two sequences; a folder without it has no pairs
``desirable.u1``   [n]  1 where the row is a desirable answer; a folder without it has no labels, one with it no pairs
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from mlora_worker.data.errors import DataError
from mlora_worker.data.training_rows.token_rows import (
    RowsDigest,
    TokenRow,
    TokenRows,
    unless_all_one,
    weight_bytes,
)
from mlora_worker.protocol import FailureReason

_NAMES = ("ids.i4", "learnt.u1", "ends.i8", "supervised.i4", "weights.f8")
_SPLITS, _DESIRABLE = "splits.i4", "desirable.u1"
_TOKEN_BYTES, _ROW_BYTES, _PAIR_BYTES = 4 + 1, 8 + 4 + 8, 8 + 4 + 8 + 4  # on disk
_BUFFER = 1 << 20
_PRIVATE = 0o600
_MAP_FAILED = ctypes.c_void_p(-1).value
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FolderWriter:
    """Writes rows into ``folder``, which nobody else can read. Raises OSError where there is no room; DataError
    (InvalidSpec) before there are more than ``most_bytes``: the disk is shared with others' rows.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self.opened: Callable[[Path, str], TokenRows] = open_rows  # gives the rows of a folder
        self._most_bytes = most_bytes
        self._rows = 0
        self._files = [_private(folder / name) for name in _NAMES]
        self._digest = RowsDigest()
        self._end = 0

    def add(
        self,
        ids: npt.NDArray[np.int32],
        learnt: npt.NDArray[np.bool_],
        labels: npt.NDArray[np.int32],
        count: int,
        weight: float = 1.0,
        split: int = 0,
        desirable: bool | None = None,
    ) -> None:
        self._end += len(ids)
        self._rows += 1
        each = _PAIR_BYTES if split else _ROW_BYTES + (desirable is not None)
        if self._end * _TOKEN_BYTES + self._rows * each > self._most_bytes:
            raise DataError(
                FailureReason.INVALID_SPEC,
                f"the data set has more tokenised rows than the {self._most_bytes / 2**30:.3g} GiB of the worker's "
                f"disk "
                f"that rows may take, which its first {self._rows - 1} rows fill: set dataset.limit to fewer rows "
                f"(without "
                "dataset.shuffleSeed, which needs them all), or have the worker's row cache made larger",
            )
        if split and self._rows == 1:  # of pairs, all rows are pairs
            self._files.append(_private(self.folder / _SPLITS))
        if desirable is not None and self._rows == 1:  # likewise
            self._files.append(_private(self.folder / _DESIRABLE))
        tokens, marks, ends, supervised, weights, *others = self._files
        tokens.write(ids.astype("<i4", copy=False).data)
        marks.write(learnt.view(np.uint8).data)
        ends.write(self._end.to_bytes(8, "little"))
        supervised.write(count.to_bytes(4, "little"))
        weights.write(weight_bytes(weight))
        for file in others:
            file.write(split.to_bytes(4, "little") if desirable is None else bytes([desirable]))
        self._digest.add(TokenRow(ids, labels, weight, split, desirable))

    def finish(self) -> TokenRows:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        self.close()
        return self.opened(self.folder, self._digest.hexdigest())

    def close(self) -> None:
        for file in self._files:
            file.close()


def open_rows(folder: Path, digest: str) -> TokenRows:
    """Maps what a ``FolderWriter`` wrote. Raises OSError or ValueError when it is not whole."""
    with open_files(folder) as files:
        return rows_in(files, digest)


@contextmanager
def open_files(folder: Path) -> Iterator[list[int]]:
    """Descriptors of the files: of the splits or of the labels where rows have one, and without that of the weights in a
    folder of an earlier version."""
    files: list[int] = []
    try:
        for name in _NAMES[:-1]:
            files.append(os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC))
        for name in (_NAMES[-1], _SPLITS, _DESIRABLE):
            with suppress(FileNotFoundError):
                files.append(os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC))
        yield files
    finally:
        for file in files:
            os.close(file)


def rows_in(files: Sequence[int], digest: str | None) -> TokenRows:
    """What such files hold; they may be closed then. Raises OSError, and ValueError when they are not whole."""
    ids, learnt, ends_file, supervised_file, *others = files
    ends = array_in(ends_file, "<i8")
    if len(ends) and (ends[0] < 0 or bool((np.diff(ends) < 0).any())):
        raise ValueError("the ends of rows are not in order")
    tokens = int(ends[-1]) if len(ends) else 0
    weights = array_in(others[0], "<f8") if others else None
    splits = desirable = None
    if len(others) > 1:  # its size tells which it is
        labels = os.fstat(others[1]).st_size == len(ends)
        desirable = array_in(others[1], "?") if labels else None
        splits = None if labels else array_in(others[1], "<i4")
    supervised = array_in(supervised_file, "<i4")
    if any(one is not None and len(one) != len(ends) for one in (supervised, weights, splits, desirable)):
        raise ValueError("a file of rows is incomplete")
    if splits is not None and bool(((splits <= 0) | (splits >= np.diff(ends, prepend=0))).any()):
        raise ValueError("a pair of rows is split outside of it")
    return TokenRows(
        _mapped(ids, "<i4", tokens),
        _mapped(learnt, "?", tokens),
        ends,
        supervised,
        digest,
        weights=None if weights is None else unless_all_one(weights),
        splits=splits,
        desirable=desirable,
    )


def array_in(file: int, kind: str) -> npt.NDArray[Any]:
    """The whole file, read into memory. Raises ValueError when it ends within a number."""
    size = os.fstat(file).st_size
    return np.frombuffer(b"".join(_pieces(file, size)), kind)


def _pieces(file: int, size: int) -> Iterator[bytes]:
    at = 0
    while at < size and (piece := os.pread(file, size - at, at)):
        at += len(piece)
        yield piece


def _mapped(file: int, kind: str, count: int) -> npt.NDArray[Any]:
    """Read-only, and for the kernel, too: what could be written to would count against a rank's memory budget
    (``pipeline/budget.py``), and a task that only waits would take room from those that train. The file does not stay open,
    as it would with ``mmap.mmap``: the rows of thousands of tasks may wait. They are read in an order that nobody can
    foresee, so nothing is read ahead.
    """
    size = count * np.dtype(kind).itemsize
    if os.fstat(file).st_size != size:
        raise ValueError("a file of tokens is incomplete")
    if not count:
        return np.empty(0, kind)
    address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_PRIVATE, file, 0)
    if address in (None, _MAP_FAILED):
        number = ctypes.get_errno()
        raise OSError(number, f"tokenised rows cannot be mapped: {os.strerror(number)}")
    _LIBC.madvise(address, size, mmap.MADV_RANDOM)
    memory: Any = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, size).atexit = False
    array: npt.NDArray[Any] = np.frombuffer(memory, kind)
    array.flags.writeable = False
    return array


def _private(path: Path) -> BinaryIO:
    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_EXCL, _PRIVATE)

    return open(path, "wb", buffering=_BUFFER, opener=opener)
