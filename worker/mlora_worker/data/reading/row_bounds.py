"""How much a row may be made of: a text of few bytes can stand for values that take many times its size in memory.

An empty list is 2 bytes of JSON and 64 of Python's, an object with one value takes 250. So besides its bytes
(``line_splitter.LONGEST_LINE``), the number of a row's values is bounded, and counted before any of them is made.

To tokenise a text takes up to some 215 bytes of memory for each of its bytes in UTF-8, until the tokens are in arrays. So
what a row is learnt from is bounded, too, by the memory that there is for it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from mlora_worker.data.reading.row_types import InvalidRow

MOST_VALUES: Final = 200_000  # of one row: lists, objects, texts, numbers, and the names in objects
_BYTES_OF_A_BYTE: Final = 400  # with what is held beside the tokens
MOST_TEXT: Final = 5 * 2**19  # bytes of the texts that one row is learnt from, where memory allows it
MOST_COLUMNS: Final = 10_000  # of a CSV file
MOST_COMMAS: Final = 1_000_000  # of one row of a CSV file, those within texts with them
_BEFORE_VALUES = b"[{,:"  # one of them stands before each value and each name, but the first
_AT_ONCE = 2**18  # bytes


def most_text(memory: int) -> int:
    """Bytes that the texts of one row may have, for whom has so much ``memory``."""
    return min(MOST_TEXT, memory // _BYTES_OF_A_BYTE)


def text_bytes(texts: Iterable[str]) -> int:
    """In UTF-8; half a surrogate pair counts as one character."""
    return sum(len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")) for text in texts)


def too_much_text(texts: Sequence[str], most: int) -> str | None:
    """What is wrong with a row of so much text; None when nothing is."""
    if 4 * sum(map(len, texts)) <= most or (found := text_bytes(texts)) <= most:
        return None
    return (
        f"has {found / 2**20:.1f} MiB of text; a row may have {most / 2**20:g} MiB, as much as the memory for its "
        f"tokens "
        "allows: shorten it, or split it into several rows"
    )


def too_many_values() -> InvalidRow:
    return InvalidRow(
        f"has more than {MOST_VALUES:,} values and names, counting empty lists and objects: remove columns that "
        f"training does not use, or split the row"
    )


def has_too_many_values(text: bytes) -> bool:
    """Whether a JSON text has more than ``MOST_VALUES``. Right for the part of it that is JSON, whatever follows."""
    if len(text) <= MOST_VALUES:
        return False
    if sum(text.count(sign) for sign in _BEFORE_VALUES) <= MOST_VALUES:
        return False
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # so that each quote begins or ends a text
    table = np.zeros(256, np.bool_)
    table[list(_BEFORE_VALUES)] = True
    found, within = 0, 0
    for start in range(0, len(plain), _AT_ONCE):
        part = np.frombuffer(plain, np.uint8, min(_AT_ONCE, len(plain) - start), start)
        quotes = np.cumsum(part == ord('"'), dtype=np.int32) + within
        found += int(np.count_nonzero(table[part] & (quotes % 2 == 0)))
        within = int(quotes[-1]) % 2
        if found > MOST_VALUES:
            return True
    return False
