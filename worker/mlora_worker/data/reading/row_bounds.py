"""How much a row may be made of: a text of few bytes can stand for values that take many times its size in memory.

An empty list is 2 bytes of JSON and 64 of Python's, an object with one value takes 250. So besides its bytes
(``line_splitter.LONGEST_LINE``), the number of a row's values is bounded, and counted before any of them is made. Pure.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mlora_worker.data.reading.row_types import Flaw

MOST_VALUES: Final = 200_000  # of one row: lists, objects, texts, numbers, and the names in objects
MOST_COLUMNS: Final = 10_000  # of a CSV file
MOST_COMMAS: Final = 1_000_000  # of one row of a CSV file, those within texts with them
_BEFORE_VALUES = b"[{,:"  # one of them stands before each value and each name, but the first
_AT_ONCE = 2**18  # bytes


def too_many_values() -> Flaw:
    return Flaw(
        f"has more than {MOST_VALUES:,} values and names, empty lists and objects with them: leave out columns that "
        "nothing is learnt of, or split the row"
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
