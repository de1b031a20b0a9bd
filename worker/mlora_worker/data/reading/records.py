"""Rows out of the bytes of a text file: JSON Lines, a JSON array, CSV. Read piece by piece; pure.

A row that cannot be read becomes an ``InvalidRow``, so that a user sees the first ten of them at once. What makes the rest
of a file unreadable ends it with one.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from mlora_worker.data.reading.row_bounds import (
    MOST_COLUMNS,
    MOST_COMMAS,
    MOST_VALUES,
    has_too_many_values,
    too_many_values,
)
from mlora_worker.data.reading.row_types import InvalidRow, Record
from mlora_worker.storage.remote.line_splitter import LONGEST_LINE, LineTooLong, split_lines

_BOM = b"\xef\xbb\xbf"
_JSON_SPACE = b" \t\r\n"
_BRACKETS = re.compile(rb'["\[\]{}]')
_STRING_END = re.compile(rb'["\\]')
_SCALAR_END = re.compile(rb"[,\]]")


def json_lines(pieces: Iterable[bytes]) -> Iterator[Record]:
    """One JSON object a line; blank lines are no rows, but count as lines."""
    for number, line in _numbered_lines(pieces):
        if isinstance(line, InvalidRow):
            yield Record(number, line)
        elif line.strip():
            yield Record(
                number,
                _object_of(line, "write one JSON object per line, or for CSV set dataset.fileFormat: csv"),
            )


def json_array(pieces: Iterable[bytes]) -> Iterator[Record]:
    """The objects of one JSON array, each read on its own; they are numbered as rows."""
    number = 0
    for number, element in enumerate(_elements(pieces), start=1):
        if isinstance(element, InvalidRow):
            yield Record(number, element)
            return
        yield Record(number, _object_of(element, "write an array of objects"))


def csv_rows(pieces: Iterable[bytes], longest: int = LONGEST_LINE) -> Iterator[Record]:
    """The first row names the columns. Every value is text. A row is numbered by the line that it begins in.

    ``longest``: bytes of one row, which may have many lines.
    """
    csv.field_size_limit(LONGEST_LINE)
    broken: list[Record] = []
    begins, held, commas = 1, 0, 0  # of the row that is read now: its first line, bytes and commas so far

    def texts() -> Iterator[str]:
        nonlocal held, commas
        for number, line in _numbered_lines(pieces):
            flaw = line if isinstance(line, InvalidRow) else None
            held += 0 if isinstance(line, InvalidRow) else len(line) + 1
            commas += 0 if isinstance(line, InvalidRow) else line.count(b",")
            if held > longest + 1:
                broken.append(Record(begins, InvalidRow(str(LineTooLong(longest)))))
                return
            if commas > MOST_COMMAS:
                broken.append(
                    Record(
                        begins, InvalidRow(f"has more than {MOST_COMMAS:,} commas; check dataset.fileFormat")
                    )
                )
                return
            if not isinstance(line, InvalidRow):
                try:
                    yield line.decode("utf-8") + "\n"
                    continue
                except UnicodeDecodeError as error:
                    flaw = InvalidRow(f"not UTF-8 at byte {error.start + 1}")
            assert flaw is not None
            broken.append(Record(number, flaw))
            return

    reader = csv.reader(texts(), strict=True)
    header: list[str] | None = None
    while True:
        begins, held, commas = reader.line_num + 1, 0, 0
        try:
            row = next(reader, None)
        except csv.Error as error:
            yield broken[0] if broken else Record(begins, InvalidRow(f"not CSV ({error})"))
            return
        if broken:
            yield broken[0]
            return
        if row is None:
            return
        if not row:
            continue
        if header is None:
            header = row
            twice = sorted(name for name, times in Counter(header).items() if times > 1)
            if twice:
                yield Record(begins, InvalidRow(f"has more than one column {twice[0]!r}"))
                return
            if len(header) > MOST_COLUMNS:
                yield Record(
                    begins, InvalidRow(f"names {len(header):,} columns, and may name {MOST_COLUMNS:,}")
                )
                return
        elif len(row) != len(header):
            yield Record(
                begins, InvalidRow(f"has {len(row)} values, the first row names {len(header)} columns")
            )
        else:
            yield Record(begins, dict(zip(header, row, strict=True)))


def _numbered_lines(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes | InvalidRow]]:
    number = 0
    try:
        for number, line in enumerate(split_lines(pieces), start=1):
            yield number, line.removeprefix(_BOM) if number == 1 else line
    except LineTooLong as error:
        yield number + 1, InvalidRow(str(error))


def _object_of(text: bytes, advice: str) -> dict[str, Any] | InvalidRow:
    if has_too_many_values(text):
        return too_many_values()
    try:
        row = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return InvalidRow(f"not UTF-8 at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return InvalidRow(f"not JSON ({error.msg} at column {error.colno}); {advice}")
    except RecursionError:
        return InvalidRow("nests lists and objects too deeply to be read")
    except ValueError:  # absurdly long numbers
        return InvalidRow("not JSON that can be read")
    if not isinstance(row, dict):
        return InvalidRow(f"is {_json_kind(row)}, not an object; {advice}")
    return row


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, list):
        return "a list"
    return "text" if isinstance(value, str) else "a number"


def _elements(pieces: Iterable[bytes]) -> Iterator[bytes | InvalidRow]:
    """The texts between the commas of the outermost array. Only brackets and strings are looked at, so that a flaw in
    one element does not hide the next ones.
    """
    scan = _ArrayScan(iter(pieces))
    if not scan.opens():
        yield InvalidRow(
            "the file is not a JSON array: for one object per line, set dataset.fileFormat to jsonl"
        )
        return
    while True:
        element = scan.next_element()
        if element is None:
            return
        yield element
        if isinstance(element, InvalidRow):
            return


class _ArrayScan:
    """A window on the file that moves from element to element."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._window = b""
        self._at = 0
        self._first = True

    def opens(self) -> bool:
        self._skip_space()
        if self._window[self._at : self._at + 3] == _BOM:
            self._at += 3
            self._skip_space()
        opened = self._window[self._at : self._at + 1] == b"["
        self._at += 1
        return opened

    def next_element(self) -> bytes | InvalidRow | None:
        """None at the array's end."""
        after = self._skip_space()
        if after == b"]":
            self._at += 1
            return InvalidRow("there is text after the end of the array") if self._skip_space() else None
        if not self._first:
            if after != b",":
                return InvalidRow("the array is truncated" if not after else "a comma is missing before it")
            self._at += 1
            self._skip_space()
        self._first = False
        return self._element()

    def _skip_space(self) -> bytes:
        """The next byte that is none; empty at the file's end."""
        while True:
            rest = self._window[self._at : self._at + 64].lstrip(_JSON_SPACE)
            if rest:
                self._at += min(64, len(self._window) - self._at) - len(rest)
                return rest[:1]
            self._at = min(self._at + 64, len(self._window))
            if self._at >= len(self._window) and not self._more(self._at):
                return b""

    def _element(self) -> bytes | InvalidRow:
        start = place = self._at
        if self._window[start : start + 1] not in (b"{", b"[", b'"'):
            return self._scalar(start)
        depth = steps = 0
        while True:
            steps += 1
            if steps > 3 * MOST_VALUES:  # each value has two brackets or a text, at most, and a name
                return too_many_values()
            found = _BRACKETS.search(self._window, place)
            if found is None:
                place = len(self._window) - start
                if place > LONGEST_LINE:
                    return InvalidRow(str(LineTooLong()))
                if not self._more(start):
                    return InvalidRow("the array is truncated")
                start = 0
                continue
            place = found.end()
            match found.group():
                case b'"':
                    ended = self._after_string(start, place)
                    if ended is None:
                        return InvalidRow("the array is truncated, or the row is too long")
                    start, place = ended
                case b"{" | b"[":
                    depth += 1
                case _:
                    depth -= 1
            if depth <= 0:
                self._at = place
                return self._window[start:place]

    def _scalar(self, start: int) -> bytes | InvalidRow:
        """A number or a word, which is no row: it is named as such."""
        while (end := _SCALAR_END.search(self._window, start)) is None:
            if len(self._window) - start > LONGEST_LINE or not self._more(start):
                return InvalidRow("the array is truncated")
            start = 0
        self._at = end.start()
        return self._window[start : end.start()]

    def _after_string(self, start: int, place: int) -> tuple[int, int] | None:
        """Where the element starts and where its string that opened before ``place`` has ended; None: nowhere."""
        while True:
            found = _STRING_END.search(self._window, place)
            if found is not None and found.group() == b'"':
                return start, found.end()
            if found is not None and found.end() < len(self._window):
                place = found.end() + 1  # what is escaped ends nothing
                continue
            place = (len(self._window) if found is None else found.start()) - start
            if place > LONGEST_LINE or not self._more(start):
                return None
            start = 0

    def _more(self, start: int) -> bool:
        """Adds a piece to the window, which from then on begins at ``start``; False at the file's end."""
        piece = next(self._pieces, None)
        while piece == b"":
            piece = next(self._pieces, None)
        if piece is None:
            return False
        self._window, self._at = self._window[start:] + piece, 0
        return True
