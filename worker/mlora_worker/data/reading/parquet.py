"""Rows of a Parquet file: only the columns that are wanted, at most a few hundred rows at a time, read by ranges.

A small file may stand for very long rows: a text that is stored once can be the value of many. So texts are read as
references to the values that are stored, and a row is measured before it is made.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mlora_worker.data.reading.compression import Undecodable, arrow_or_undecodable
from mlora_worker.data.reading.row_bounds import MOST_VALUES, too_many_values
from mlora_worker.data.reading.row_types import Flaw, Record
from mlora_worker.storage.remote.dataset_source import Source
from mlora_worker.storage.remote.line_splitter import LONGEST_LINE

_MOST_ROWS_AT_ONCE = 512
_BYTES_AT_ONCE = 2**26  # of rows of the file's mean length
_READ_AHEAD = 2**20  # bytes; the pages of a column lie one after the other


def parquet_rows(
    source: Source, uri: str, columns: Collection[str], longest: int = LONGEST_LINE
) -> Iterator[Record]:
    """Rows are numbered from 1. A column that the file lacks is missing in its rows, too. ``longest``: bytes of one row.

    Raises StorageError; Undecodable.
    """
    arrow = arrow_or_undecodable("a Parquet file")
    import pyarrow.parquet

    def opened(**options: Any) -> Any:
        stream = io.BufferedReader(_Ranged(source, uri), _READ_AHEAD)
        return pyarrow.parquet.ParquetFile(stream, buffer_size=_READ_AHEAD, **options)

    try:
        footer = opened()
        names = footer.schema_arrow.names
        # Rows without a known column: their own names are what the message about the missing one needs.
        there = [name for name in names if name in columns] or names[:10]
        file = opened(metadata=footer.metadata, read_dictionary=_texts_of(footer.schema, there))
        number = 0
        for batch in file.iter_batches(_rows_at_once(footer.metadata), columns=there, use_threads=False):
            sizes = sum((_sizes(column) for column in batch.columns), np.zeros(len(batch), np.int64))
            values = sum((_values(column) for column in batch.columns), np.zeros(len(batch), np.int64))
            named = list(zip(batch.schema.names, batch.columns, strict=True))
            for row, size in enumerate(sizes):
                number += 1
                if values[row] > MOST_VALUES:
                    yield Record(number, too_many_values())
                    continue
                if size > longest:
                    yield Record(
                        number, Flaw(f"has {size} bytes; a row may have at most {longest / 2**20:g} MiB")
                    )
                else:
                    yield Record(number, {name: column[row].as_py() for name, column in named})
    except MemoryError:  # Arrow's own is an ArrowException, too
        raise
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:  # OSError: what damaged pages raise
        raise Undecodable(f"is no Parquet file that can be read ({str(error)[:200]})") from None


def _texts_of(schema: Any, columns: Collection[str]) -> list[str]:
    leaves = [schema.column(place) for place in range(len(schema))]
    return [
        leaf.path
        for leaf in leaves
        if leaf.physical_type == "BYTE_ARRAY"
        and any(f"{leaf.path}.".startswith(f"{one}.") for one in columns)
    ]


def _rows_at_once(metadata: Any) -> int:
    groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
    mean = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    return int(max(1, min(_MOST_ROWS_AT_ONCE, _BYTES_AT_ONCE // max(1, mean))))


def _sizes(column: Any) -> npt.NDArray[np.int64]:
    """[rows] bytes of each value of an Arrow array once it is made, about; a reference counts what it refers to."""
    import pyarrow.compute as compute
    from pyarrow import types

    kind = column.type
    if types.is_dictionary(kind):
        stored = np.append(_sizes(column.dictionary), 0)
        chosen = compute.fill_null(column.indices, len(stored) - 1).to_numpy(zero_copy_only=False)
        referred: npt.NDArray[np.int64] = stored[chosen]
        return referred
    if (
        types.is_string(kind)
        or types.is_binary(kind)
        or types.is_large_string(kind)
        or types.is_large_binary(kind)
    ):
        lengths = compute.fill_null(compute.binary_length(column), 0)
        return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)
    if types.is_list(kind) or types.is_large_list(kind):
        before = np.concatenate([[0], np.cumsum(_sizes(column.values) + 8)])
        offsets = column.offsets.to_numpy(zero_copy_only=False)
        return np.asarray(before[offsets[1:]] - before[offsets[:-1]], np.int64)
    if types.is_struct(kind):
        fields = (_sizes(column.field(place)) for place in range(kind.num_fields))
        return sum(fields, np.zeros(len(column), np.int64))
    if types.is_primitive(kind) or types.is_null(kind):
        return np.full(len(column), 8, np.int64)
    return np.array([column.slice(row, 1).nbytes for row in range(len(column))], np.int64)


def _values(column: Any) -> npt.NDArray[np.int64]:
    """[rows] values that each value of an Arrow array is made of, itself and the names in objects with them."""
    from pyarrow import types

    kind = column.type
    one = np.ones(len(column), np.int64)
    if types.is_fixed_size_list(kind):
        inner = _values(column.values)[column.offset * kind.list_size :][: len(column) * kind.list_size]
        return one + np.asarray(inner.reshape(len(column), kind.list_size).sum(1), np.int64)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        before = np.concatenate([[0], np.cumsum(_values(column.values))])
        offsets = column.offsets.to_numpy(zero_copy_only=False)
        return np.asarray(one + before[offsets[1:]] - before[offsets[:-1]], np.int64)
    if types.is_struct(kind):
        return sum((1 + _values(column.field(place)) for place in range(kind.num_fields)), one)
    return one


class _Ranged(io.RawIOBase):
    """An object of a source as a file."""

    def __init__(self, source: Source, uri: str) -> None:
        self._source = source
        self._uri = uri
        self._size = source.size(uri)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._size - self._at))
        if length:
            buffer[:length] = self._source.read_range(self._uri, self._at, length)
            self._at += length
        return length
