"""The first rows of a file on this machine, read as the worker reads them, as far as their columns go."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import zlib
from pathlib import Path
from textwrap import shorten
from typing import Any

from mlora_operator.cli import exit_codes
from mlora_operator.cli.output import CommandError
from mlora_worker.lines import one_line
from mlora_worker.protocol import FIRST_ROWS

_BEGINNING = 4 * 2**20  # bytes that are read for them
_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"


def first_rows(path: Path) -> list[dict[str, Any]]:
    """At most ``FIRST_ROWS``. Raises CommandError when the file has none that can be read."""
    try:
        rows = _parquet(path) if _begins(path, _PARQUET) else _of_text(path.name, _text(path))
    except OSError as error:
        raise CommandError(f"--data {path}: {error.strerror or error}", exit_codes.INVALID) from error
    except UnicodeDecodeError as error:
        message = f"--data {path}: not text in UTF-8: save it in that encoding"
        raise CommandError(message, exit_codes.INVALID) from error
    except (ValueError, EOFError, RecursionError, zlib.error, csv.Error) as error:
        raise CommandError(f"--data {path}: no rows can be read: {error}", exit_codes.INVALID) from error
    if not rows:
        raise CommandError(f"--data {path}: the file has no rows", exit_codes.INVALID)
    return rows


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _text(path: Path) -> str:
    """The file's beginning, unpacked. A character that is cut in two at its end is left out."""
    if _begins(path, _ZSTD):
        raise ValueError("unpack it first, or give --format and --field")
    with gzip.open(path) if _begins(path, _GZIP) else path.open("rb") as file:
        content = file.read(_BEGINNING)
    whole = content if len(content) < _BEGINNING else content[: content.rfind(b"\n") + 1] or content
    return whole.decode("utf-8-sig", errors="strict" if len(content) < _BEGINNING else "ignore")


def _of_text(name: str, text: str) -> list[dict[str, Any]]:
    plain = name.removesuffix(".gz")
    if plain.endswith(".csv"):
        table = csv.DictReader(io.StringIO(text))
        return [dict(row) for row, _ in zip(table, range(FIRST_ROWS), strict=False)]
    if plain.endswith(".json") and text.lstrip().startswith("["):
        return _of_array(text)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [_row(_of_line(number, line)) for number, line in lines[:FIRST_ROWS]]


def _of_line(number: int, line: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        begins = shorten(one_line(line), 60, placeholder="...")
        raise ValueError(f"line {number} is not JSON ({error.msg}): {begins}") from None


def _of_array(text: str) -> list[dict[str, Any]]:
    """Object by object, since the end of a large array was not read."""
    decoder = json.JSONDecoder()
    rows: list[dict[str, Any]] = []
    place = text.index("[") + 1
    while len(rows) < FIRST_ROWS:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        if place >= len(text) or text[place] == "]":
            return rows
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError:
            if rows:
                return rows
            raise
        rows.append(_row(value))
    return rows


def _row(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a row must be an object, not {json.dumps(value)[:40]}")
    return value


def _parquet(path: Path) -> list[dict[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError("reading Parquet needs pyarrow: run pip install 'mlora-operator[arrow]'")
    from pyarrow.parquet import ParquetFile

    batch = next(ParquetFile(path).iter_batches(batch_size=FIRST_ROWS), None)
    rows: list[dict[str, Any]] = batch.to_pylist() if batch is not None else []
    return rows
