"""Rows of a Parquet file: only the columns that are wanted, a few hundred rows at a time, read by ranges."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from typing import Any

from mlora_worker.data.compression import Undecodable, arrow_or_undecodable
from mlora_worker.data.rows import Record
from mlora_worker.storage.sources import Source

_ROWS_AT_ONCE = 512
_READ_AHEAD = 2**20  # bytes; the pages of a column lie one after the other


def parquet_rows(source: Source, uri: str, columns: Collection[str]) -> Iterator[Record]:
    """Rows are numbered from 1. A column that the file lacks is missing in its rows, too. Raises Undecodable."""
    arrow = arrow_or_undecodable("a Parquet file")
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(
            io.BufferedReader(_Ranged(source, uri), _READ_AHEAD), buffer_size=_READ_AHEAD
        )
        there = [name for name in file.schema_arrow.names if name in columns]
        if not there:
            # Rows without a known column: their own names are what the message about the missing one needs.
            there = file.schema_arrow.names[:10]
        number = 0
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=there, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield Record(number, row)
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise Undecodable(f"is no Parquet file that can be read ({str(error)[:200]})") from None


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
