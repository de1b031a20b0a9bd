"""Lines of a large object that is read piece by piece. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

LONGEST_LINE: Final = 64 * 2**20  # bytes; a row of more is a mistake, or made to fill the memory


class LineTooLong(ValueError):
    def __init__(self, longest: int = LONGEST_LINE) -> None:
        super().__init__(f"is longer than {longest / 2**20:g} MiB; check dataset.fileFormat")


def split_lines(pieces: Iterable[bytes], longest: int = LONGEST_LINE) -> Iterator[bytes]:
    """Lines without ``\\n``. Only ``\\n`` ends a line: JSON text may hold U+2028 and friends. The last needs
    none. Raises LineTooLong once the lines before that one have been given.
    """
    unfinished: list[bytes] = []  # joined once per line: a long line costs linear time
    held = 0
    for piece in pieces:
        first, *others = piece.split(b"\n")
        unfinished.append(first)
        held += len(first)
        if held > longest:
            raise LineTooLong(longest)
        for line in others:
            yield b"".join(unfinished)
            unfinished, held = [line], len(line)
    last = b"".join(unfinished)
    if last:
        yield last
