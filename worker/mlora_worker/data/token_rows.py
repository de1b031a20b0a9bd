"""Tokenised rows: in memory, or on disk as arrays that are mapped into memory. A row is a view.

A folder holds, for n rows of t tokens together, all little-endian:
``ids.i4``         [t]  the tokens
``learnt.u1``      [t]  1 where the model shall learn to write that token
``ends.i8``        [n]  where each row ends in the two above
``supervised.i4``  [n]  labels of each row
``weights.f8``     [n]  weight of each row; a folder without it has all 1
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import struct
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, overload

import numpy as np
import numpy.typing as npt

from mlora_worker.data.errors import DataError
from mlora_worker.protocol import FailureReason

IGNORED = -100  # label of a position that is not supervised

_IDS, _LEARNT, _ENDS, _SUPERVISED = "ids.i4", "learnt.u1", "ends.i8", "supervised.i4"
_WEIGHTS = "weights.f8"
_TOKEN_BYTES, _ROW_BYTES = 4 + 1, 8 + 4 + 8  # on disk
_WEIGHT_FOLLOWS = b"\xff" * 8  # in a digest; no row is so long
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


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """``labels[i]`` is the token to predict AT position i: ``ids[i + 1]`` if that token is supervised, else
    -100. The shift is done here once; nobody shifts again.
    """

    ids: npt.NDArray[np.int32]  # [tokens]
    labels: npt.NDArray[np.int32]  # [tokens]
    weight: float = 1.0  # of its loss


def labels_of(ids: npt.NDArray[np.int32], supervised: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """[tokens] -> [tokens], shifted: see ``TokenRow``. The first token has nobody to predict it."""
    labels = np.full(len(ids), IGNORED, np.int32)
    labels[:-1][supervised[1:]] = ids[1:][supervised[1:]]
    return labels


class TokenRows(Sequence[TokenRow]):
    """Rows in training order. Their arrays are made when they are asked for."""

    def __init__(
        self,
        ids: npt.NDArray[np.int32],
        learnt: npt.NDArray[np.bool_],
        ends: npt.NDArray[np.int64],
        supervised: npt.NDArray[np.int32],
        digest: str | None = None,
        chosen: npt.NDArray[np.intp] | None = None,
        weights: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """See the module for the arrays; without ``weights`` all are 1. ``digest`` is that of all rows; ``chosen`` are
        those that count, in order."""
        self._ids, self._learnt, self._ends, self._supervised = ids, learnt, ends, supervised
        self._digest = digest
        self._chosen = chosen
        self._weights = weights

    def __len__(self) -> int:
        return len(self._ends) if self._chosen is None else len(self._chosen)

    @overload
    def __getitem__(self, place: int) -> TokenRow: ...
    @overload
    def __getitem__(self, place: slice) -> list[TokenRow]: ...
    def __getitem__(self, place: int | slice) -> TokenRow | list[TokenRow]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        row = place % len(self) if self._chosen is None else int(self._chosen[place])
        cut = slice(int(self._ends[row - 1]) if row else 0, int(self._ends[row]))
        ids = self._ids[cut]
        weight = 1.0 if self._weights is None else float(self._weights[row])
        return TokenRow(ids, labels_of(ids, self._learnt[cut]), weight)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[rows] tokens of each."""
        lengths = np.diff(self._ends, prepend=0)
        return lengths if self._chosen is None else lengths[self._chosen]

    @property
    def supervised(self) -> npt.NDArray[np.int32]:
        """[rows] labels of each."""
        return self._supervised if self._chosen is None else self._supervised[self._chosen]

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """[rows] weight of each."""
        if self._weights is None:
            return np.ones(len(self))
        return self._weights if self._chosen is None else self._weights[self._chosen]

    def digest(self) -> str:
        """See ``rows_digest``."""
        return self._digest if self._digest is not None and self._chosen is None else rows_digest(self)

    def chosen(self, rows: npt.NDArray[np.intp]) -> TokenRows:
        """Some of these rows, in this order, of the same memory."""
        kept = rows if self._chosen is None else self._chosen[rows]
        return TokenRows(
            self._ids, self._learnt, self._ends, self._supervised, self._digest, kept, self._weights
        )


def rows_digest(rows: Iterable[TokenRow]) -> str:
    """SHA-256 over the tokens and labels of all rows, each with its length in front; and over weights other than 1."""
    digest = RowsDigest()
    for row in rows:
        digest.add(row)
    return digest.hexdigest()


class RowsDigest:
    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, row: TokenRow) -> None:
        self._digest.update(len(row.ids).to_bytes(8, "little"))
        self._digest.update(row.ids.astype("<i4", copy=False).tobytes())
        self._digest.update(row.labels.astype("<i4", copy=False).tobytes())
        if row.weight != 1.0:
            self._digest.update(_WEIGHT_FOLLOWS + _bytes_of(row.weight))

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class RowWriter(Protocol):
    """Takes rows one after the other, and gives them all at the end."""

    def add(
        self,
        ids: npt.NDArray[np.int32],
        learnt: npt.NDArray[np.bool_],
        labels: npt.NDArray[np.int32],
        count: int,
        weight: float = 1.0,
    ) -> None:
        """``learnt``: whether a token is supervised; ``labels`` follow from it, and ``count`` of them are tokens."""
        ...

    def finish(self) -> TokenRows: ...


class MemoryWriter:
    """Keeps all rows in memory: for few of them."""

    def __init__(self) -> None:
        self._ids: list[npt.NDArray[np.int32]] = []
        self._learnt: list[npt.NDArray[np.bool_]] = []
        self._supervised: list[int] = []
        self._weights: list[float] = []

    def add(
        self,
        ids: npt.NDArray[np.int32],
        learnt: npt.NDArray[np.bool_],
        labels: npt.NDArray[np.int32],
        count: int,
        weight: float = 1.0,
    ) -> None:
        del labels
        self._ids.append(ids.copy())
        self._learnt.append(learnt.copy())
        self._supervised.append(count)
        self._weights.append(weight)

    def finish(self) -> TokenRows:
        ends = np.cumsum([len(one) for one in self._ids], dtype=np.int64)
        return TokenRows(
            np.concatenate(self._ids) if self._ids else np.empty(0, np.int32),
            np.concatenate(self._learnt) if self._learnt else np.empty(0, np.bool_),
            ends,
            np.array(self._supervised, np.int32),
            weights=_unless_all_one(np.array(self._weights, np.float64)),
        )


class FolderWriter:
    """Writes rows into ``folder``, which nobody else can read. Raises OSError where there is no room; DataError
    (InvalidSpec) before there are more than ``most_bytes``: the disk is shared with others' rows.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._rows = 0
        self._files = [_private(folder / name) for name in (_IDS, _LEARNT, _ENDS, _SUPERVISED, _WEIGHTS)]
        self._digest = RowsDigest()
        self._end = 0

    def add(
        self,
        ids: npt.NDArray[np.int32],
        learnt: npt.NDArray[np.bool_],
        labels: npt.NDArray[np.int32],
        count: int,
        weight: float = 1.0,
    ) -> None:
        self._end += len(ids)
        self._rows += 1
        if self._end * _TOKEN_BYTES + self._rows * _ROW_BYTES > self._most_bytes:
            raise DataError(
                FailureReason.INVALID_SPEC,
                f"the data set has more tokenised rows than the {self._most_bytes / 2**30:.3g} GiB of the worker's disk "
                f"that rows may take, which its first {self._rows - 1} rows fill: set dataset.limit to fewer rows (without "
                "dataset.shuffleSeed, which needs them all), or have the worker's row cache made larger",
            )
        tokens, marks, ends, supervised, weights = self._files
        tokens.write(ids.astype("<i4", copy=False).data)
        marks.write(learnt.view(np.uint8).data)
        ends.write(self._end.to_bytes(8, "little"))
        supervised.write(count.to_bytes(4, "little"))
        weights.write(_bytes_of(weight))
        self._digest.add(TokenRow(ids, labels, weight))

    def finish(self) -> TokenRows:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        self.close()
        return open_rows(self.folder, self._digest.hexdigest())

    def close(self) -> None:
        for file in self._files:
            file.close()


def open_rows(folder: Path, digest: str) -> TokenRows:
    """Maps what a ``FolderWriter`` wrote. Raises OSError or ValueError when it is not whole."""
    ends: npt.NDArray[np.int64] = np.fromfile(folder / _ENDS, "<i8")
    tokens = int(ends[-1]) if len(ends) else 0
    weights = np.fromfile(folder / _WEIGHTS, "<f8") if (folder / _WEIGHTS).exists() else None
    rows = TokenRows(
        _mapped(folder / _IDS, "<i4", tokens),
        _mapped(folder / _LEARNT, "?", tokens),
        ends,
        np.fromfile(folder / _SUPERVISED, "<i4"),
        digest,
        weights=None if weights is None else _unless_all_one(weights),
    )
    if len(rows.supervised) != len(ends) or (weights is not None and len(weights) != len(ends)):
        raise ValueError(f"{folder} is not whole")
    return rows


def _unless_all_one(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
    return None if bool((weights == 1.0).all()) else weights


def _bytes_of(weight: float) -> bytes:
    return struct.pack("<d", weight)


def _mapped(path: Path, kind: str, count: int) -> npt.NDArray[Any]:
    """Read-only, and for the kernel, too: what could be written to would count against a rank's memory budget
    (``pipeline/budget.py``), and a task that only waits would take room from those that train. The file does not stay open,
    as it would with ``mmap.mmap``: the rows of thousands of tasks may wait. They are read in an order that nobody can
    foresee, so nothing is read ahead.
    """
    size = count * np.dtype(kind).itemsize
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != size:
            raise ValueError(f"{path} is not whole")
        if not count:
            return np.empty(0, kind)
        address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)
    if address in (None, _MAP_FAILED):
        number = ctypes.get_errno()
        raise OSError(number, f"{path} cannot be mapped: {os.strerror(number)}")
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
