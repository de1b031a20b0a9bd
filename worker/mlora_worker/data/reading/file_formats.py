"""Which kind of file a name says it is, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Final

from mlora_worker.data.reading.compression import unpacked
from mlora_worker.data.reading.parquet import MOST_ROWS_AT_ONCE, parquet_rows
from mlora_worker.data.reading.records import csv_rows, json_array, json_lines
from mlora_worker.data.reading.row_types import Record
from mlora_worker.protocol import FileFormat
from mlora_worker.storage.remote.dataset_source import DatasetSource
from mlora_worker.storage.remote.globs import COMPRESSED_SUFFIXES

_SUFFIXES: Final = {
    ".jsonl": FileFormat.JSONL,
    ".ndjson": FileFormat.JSONL,
    ".json": FileFormat.JSON,
    ".csv": FileFormat.CSV,
    ".parquet": FileFormat.PARQUET,
}


def format_of(name: str, given: FileFormat | None) -> FileFormat:
    """``given`` wins over the name's ending; without either it is JSON Lines."""
    if given is not None:
        return given
    bare = name.partition("?")[0].lower() if name.startswith("http") else name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        bare = bare.removesuffix(suffix)
    return next((found for suffix, found in _SUFFIXES.items() if bare.endswith(suffix)), FileFormat.JSONL)


def unit_of(format: FileFormat) -> str:
    """What the numbers of its rows count."""
    return "line" if format in (FileFormat.JSONL, FileFormat.CSV) else "row"


def records_of_file(
    source: DatasetSource,
    uri: str,
    format: FileFormat,
    columns: Collection[str] | None,
    saw: Callable[[Collection[str]], None] = lambda _: None,
    at_once: int = MOST_ROWS_AT_ONCE,
) -> Iterator[Record]:
    """``columns``: that are read of a file of columns; None: all. ``saw`` is told all columns of a file that names them by
    itself. ``at_once``: rows of such a file that are read together.

    Raises StorageError; Undecodable when it is no such file."""
    if format is FileFormat.PARQUET:
        return parquet_rows(source, uri, columns, saw=saw, at_once=at_once)
    return records_of_text(source.pieces(uri), format, uri.lower())


def records_of_text(pieces: Iterable[bytes], format: FileFormat, name: str = "") -> Iterator[Record]:
    """Of the bytes of a text file, packed or not. Many a ``.json`` file holds one object a line: it is read as such."""
    plain = unpacked(pieces)
    if format is FileFormat.CSV:
        return csv_rows(plain)
    if format is FileFormat.JSONL:
        return json_lines(plain)
    first = next(plain, b"")
    whole = chain([first], plain)
    return json_lines(whole) if _is_object(first) and ".json" in name else json_array(whole)


def _is_object(start: bytes) -> bool:
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
