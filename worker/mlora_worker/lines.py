"""What may be shown in logs and terminals of a text that comes from outside. Pure; the standard library alone."""

from __future__ import annotations

import re

# What ends a line somewhere, moves a terminal's cursor, turns text around, or cannot be written at all.
_NOT_OF_A_LINE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def one_line(text: str) -> str:
    """``text`` with everything that is no part of a line spelt out, such as ``\\n``: a text from outside makes no second
    line of a log, and says nothing to a terminal.
    """
    return _NOT_OF_A_LINE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def indented(text: str) -> str:
    """Several lines of a log that belong to the record above them, such as a traceback."""
    return "\n".join(f"  {one_line(line)}" for line in text.split("\n"))


def headed(text: str) -> str:
    """``text`` whose first line begins where it stands, and whose further lines are indented below it."""
    return indented(text)[2:]
