"""Lines of a large object that is read piece by piece. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without ``\\n``. Only ``\\n`` ends a line: JSON text may hold U+2028 and friends. The last needs
    none.
    """
    unfinished: list[bytes] = []  # joined once per line: a long line costs linear time
    for piece in pieces:
        first, *others = piece.split(b"\n")
        unfinished.append(first)
        for line in others:
            yield b"".join(unfinished)
            unfinished = [line]
    last = b"".join(unfinished)
    if last:
        yield last
