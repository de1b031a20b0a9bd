"""Rows of a Parquet file: only the columns that are wanted, at most a few hundred rows at a time, read by ranges.

A small file may stand for very long rows: a text that is stored once can be the value of many. So texts are read as
references to the values that are stored, and a row is measured before it is made. Arrow cannot do that where a text is
stored as its difference to the one before (``DELTA_BYTE_ARRAY`` and its like): of such columns few rows are read at once.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mlora_worker.data.reading.compression import Undecodable, arrow_or_undecodable
from mlora_worker.data.reading.row_bounds import MOST_VALUES, too_many_values
from mlora_worker.data.reading.row_types import InvalidRow, Record
from mlora_worker.storage.first_bytes import ENOUGH, named
from mlora_worker.storage.remote.dataset_source import DatasetSource
from mlora_worker.storage.remote.line_splitter import LONGEST_LINE

MOST_ROWS_AT_ONCE = 512
_BYTES_AT_ONCE = 2**26  # of rows of the file's mean length
_WHOLE_ROWS_AT_ONCE = 8  # where texts are made whole before they are measured
_MAGIC: Final = b"PAR1"
_DIFFERENCES: Final = frozenset({"DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"})
_READ_AHEAD = 2**20  # bytes; the pages of a column lie one after the other


def parquet_rows(
    source: DatasetSource,
    uri: str,
    columns: Collection[str] | None,
    longest: int = LONGEST_LINE,
    saw: Callable[[Collection[str]], None] = lambda _: None,
    at_once: int = MOST_ROWS_AT_ONCE,
) -> Iterator[Record]:
    """Rows are numbered from 1. A column that the file lacks is missing in its rows, too. ``columns``: None: all.
    ``longest``: bytes of one row. ``saw`` is told all columns of the file. ``at_once``: most rows that are read together.

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
        saw(names)
        # Rows without a known column: their own names are what the message about the missing one needs.
        there = [name for name in names if columns is None or name in columns] or names[:10]
        texts = _texts_of(footer.schema, there)
        whole = _stored_as_differences(footer.metadata, texts)
        file = opened(metadata=footer.metadata, read_dictionary=[text for text in texts if text not in whole])
        at_once = _rows_at_once(footer.metadata, min(at_once, _WHOLE_ROWS_AT_ONCE if whole else at_once))
        number = 0
        for batch in _batches(file, at_once, there):
            sizes = sum((_sizes(column) for column in batch.columns), np.zeros(len(batch), np.int64))
            values = sum((_values(column) for column in batch.columns), np.zeros(len(batch), np.int64))
            columns_of = list(zip(batch.schema.names, batch.columns, strict=True))
            for row, size in enumerate(sizes):
                number += 1
                if values[row] > MOST_VALUES:
                    yield Record(number, too_many_values())
                    continue
                if size > longest:
                    yield Record(
                        number,
                        InvalidRow(f"has {size} bytes; a row may have at most {longest / 2**20:g} MiB"),
                    )
                else:
                    yield Record(number, {name: column[row].as_py() for name, column in columns_of})
    except MemoryError:  # Arrow's own is an ArrowException, too
        raise
    except arrow.ArrowNotImplementedError as error:
        raise Undecodable(
            f"is a Parquet file with an unsupported feature ({str(error)[:200]}): write it again with the usual "
            f"encodings"
            " and compression and without encryption"
        ) from None
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:  # OSError: what damaged pages raise
        start = source.read_range(uri, 0, min(ENOUGH, source.size(uri)))
        if not start.startswith(_MAGIC):
            what = named(start) or "does not begin as one: set dataset.fileFormat to what it is"
            raise Undecodable(f"is not a readable Parquet file; it {what}") from None
        raise Undecodable(f"is not a readable Parquet file ({str(error)[:200]})") from None


def _batches(file: Any, at_once: int, columns: list[str]) -> Iterator[Any]:
    """None has rows of two groups: each has its own stored values, and Arrow cannot join references to both in lists."""
    for group in range(file.num_row_groups):
        yield from file.iter_batches(at_once, row_groups=[group], columns=columns, use_threads=False)


def _texts_of(schema: Any, columns: Collection[str]) -> list[str]:
    leaves = [schema.column(place) for place in range(len(schema))]
    return [
        leaf.path
        for leaf in leaves
        if leaf.physical_type == "BYTE_ARRAY"
        and any(f"{leaf.path}.".startswith(f"{one}.") for one in columns)
    ]


def _stored_as_differences(metadata: Any, texts: Collection[str]) -> set[str]:
    """Those of ``texts`` that Arrow cannot read as references: in some part of the file each is made of the one before."""
    wanted, found = set(texts), set[str]()
    leaves = range(metadata.num_columns if metadata.num_row_groups else 0)
    places = [leaf for leaf in leaves if metadata.schema.column(leaf).path in wanted]
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, places):
            if not _DIFFERENCES.isdisjoint(column.encodings):
                found.add(column.path_in_schema)
    return found


def _rows_at_once(metadata: Any, most: int) -> int:
    groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
    mean = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    return int(max(1, min(most, _BYTES_AT_ONCE // max(1, mean))))


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

    def __init__(self, source: DatasetSource, uri: str) -> None:
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
