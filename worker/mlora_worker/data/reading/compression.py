"""Bytes as they were before gzip or zstd packed them. Which of the two it was, the first bytes tell, not the name.

What comes out at once is bounded, however well it was packed, and so is all of it together: a server may send without end,
and a few bytes may stand for very many.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final

from mlora_worker.storage.first_bytes import ENOUGH, named

_AT_ONCE = 3 * 2**20  # bytes that are unpacked at once
_LEAST = 2**20  # the same, but at the end: whoever looks for the end of a row looks at each piece anew
_FED = 2**14  # packed bytes at once: the rest of them is copied as often as a packed part ends in them
MOST_BYTES: Final = 2**38  # of one file
MOST_RATIO: Final = 400  # text packs to a tenth, or to a hundredth where it repeats itself
_UNJUDGED = 64 * 2**20  # bytes that any file may unpack to
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class Undecodable(Exception):
    """``str(error)`` says what is wrong with the file."""


def unpacked(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Raises Undecodable for a packed file that is cut off or damaged, and for one that is, or holds, something else than
    text."""
    return _gathered(_bounded(_plain(_bounded(pieces))))


def _plain(pieces: Iterator[bytes]) -> Iterator[bytes]:
    start, whole = _begun(pieces)
    packed = start.startswith((_GZIP, _ZSTD))
    if start.startswith(_GZIP):
        start, whole = _begun(_gunzipped(whole))
    elif start.startswith(_ZSTD):
        start, whole = _begun(_zstd_unpacked(whole))
    found = named(start)
    if found is not None:
        raise Undecodable(f"holds, packed, what {found}" if packed else found)
    return whole


def _begun(pieces: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first bytes, and all of them."""
    start = b""
    for piece in pieces:
        start += piece
        if len(start) >= ENOUGH:
            break
    return start, chain([start], pieces)


def _bounded(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Raises Undecodable once there are more than ``MOST_BYTES``."""
    left = MOST_BYTES
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise Undecodable(f"has more than {MOST_BYTES / 2**30:g} GiB: split it into several data sets")
        yield piece


def _gathered(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """In pieces of at least ``_LEAST`` bytes, but the last."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _LEAST:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


class _Unpacking:
    """Compares what comes out with what goes in. Raises Undecodable."""

    def __init__(self) -> None:
        self._packed = self._plain = 0

    def fed(self, piece: bytes) -> bytes:
        self._packed += len(piece)
        return piece

    def made(self, piece: bytes) -> bytes:
        self._plain += len(piece)
        if self._plain > _UNJUDGED and self._plain > MOST_RATIO * self._packed:
            raise Undecodable(
                f"unpacks to more than {MOST_RATIO} times its size: check that it is a real data set"
            )
        return piece


def _gunzipped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """A file may have several members, one after the other."""
    decoder, sizes = zlib.decompressobj(wbits=31), _Unpacking()
    for fed in (piece[at : at + _FED] for piece in pieces for at in range(0, len(piece), _FED)):
        rest = sizes.fed(fed)
        while rest:
            if decoder.eof:
                if not rest.strip(b"\0"):  # some writers fill up the last block
                    break
                decoder = zlib.decompressobj(wbits=31)
            try:
                made = decoder.decompress(rest, _AT_ONCE)
            except zlib.error as error:
                raise Undecodable(f"is a damaged gzip file ({error})") from None
            if made:
                yield sizes.made(made)
            rest = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
    if not decoder.eof:
        raise Undecodable("is a truncated gzip file: upload it again")


def _zstd_unpacked(pieces: Iterable[bytes]) -> Iterator[bytes]:
    arrow, sizes = arrow_or_undecodable("a zstd file"), _Unpacking()
    packed = _Readable(map(sizes.fed, pieces))
    try:
        with arrow.CompressedInputStream(arrow.PythonFile(packed, mode="r"), "zstd") as stream:
            while made := stream.read(_AT_ONCE):
                yield sizes.made(made)
    except OSError as error:
        if "ended before" in str(error) or "end-of-stream" in str(error) or "truncated" in str(error).lower():
            raise Undecodable("is a truncated zstd file: upload it again") from None
        raise Undecodable(f"is a damaged zstd file ({error})") from None


def arrow_or_undecodable(what: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise Undecodable(
            f"is {what}, which needs the package pyarrow: install mlora-operator[arrow], or use gzip and JSON Lines"
        ) from None
    return pyarrow


class _Readable:
    """Pieces as a file that is read from its beginning to its end."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._left = b""
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        if not self._left:
            self._left = next(self._pieces, b"")
        if size < 0:
            made, self._left = self._left + b"".join(self._pieces), b""
            return made
        made, self._left = self._left[:size], self._left[size:]
        return made

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
