"""Weights' files of remote models on the worker's own volume, in blocks: only those that were asked for take room.

A file has two on the volume, named by what it is a copy of (``identity``: address, commit or ETag, size):
``KEY.data``  as long as the original, with holes where nothing was fetched yet
``KEY.sums``  32 bytes: SHA-256 of the whole file once it was found to be the expected one, else zeros; then for each block
              the SHA-256 of what was fetched, or zeros

So a killed process costs the blocks that it was fetching; a block that a power cut has damaged is found by its sum when a
process first uses it, and fetched again. Several processes, of several pipelines, may use a folder at once: a block is
fetched by one of them while the others wait for its lock, which the kernel takes back when its holder ends. A file in use
is locked, too, and is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from mlora_worker.storage.errors import StoreUnreachable

BLOCK = 32 * 2**20
_SUM = hashlib.sha256().digest_size
_NOTHING = bytes(_SUM)
_LEAST_FREE = 0.1  # of the volume stays free: the kubelet ends pods on nodes whose disk is nearly full
_PIECE = 8 * 2**20

Fetch = Callable[[int, int], Iterator[bytes]]  # start and length, to exactly these bytes
Room = Callable[
    [Path], tuple[int, int]
]  # of a folder's volume: bytes that may still be written, and all of them


class CacheFull(Exception):
    """The volume is full."""


class WeightCache:
    """``folder`` belongs to these caches alone. With more than ``most_bytes``, the least recently used files go."""

    def __init__(
        self, folder: Path, most_bytes: int, *, block: int = BLOCK, room: Room | None = None
    ) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._block = block
        self._room = room or _room_of

    def open(self, identity: str, size: int) -> CachedFile | None:
        """The copy of a file of ``size`` bytes, as far as it is here; None when the whole file would have no room."""
        stem = self._folder / hashlib.sha256(f"{identity} {size} {self._block}".encode()).hexdigest()[:40]
        data = stem.with_suffix(".data")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            needed = size - (_taken(data) if data.exists() else 0)
            if size > self._most_bytes:
                return None  # nobody else's file goes for one that is not kept anyway
            self._prune(needed, spare=data)
            free, whole = self._room(self._folder)
            if self._held() + needed > self._most_bytes or needed > free - _LEAST_FREE * whole:
                return None
            return CachedFile(stem, size, self._block)
        except OSError:
            return None

    def _held(self) -> int:
        return sum(map(_taken, self._folder.glob("*.data")))

    def _prune(self, needed: int, spare: Path) -> None:
        files = []
        for data in self._folder.glob("*.data"):
            sums = data.with_suffix(".sums")
            with contextlib.suppress(OSError):
                last_used = (sums if sums.exists() else data).stat().st_mtime
                files.append((last_used, _taken(data), data))
        excess = sum(taken for _, taken, _ in files) + needed - self._most_bytes
        for _, taken, data in sorted(files):
            if excess <= 0:
                return
            if data != spare and _remove_unused(data):
                excess -= taken


class CachedFile:
    """Thread-safe. Open until its process ends."""

    def __init__(self, stem: Path, size: int, block: int) -> None:
        """Raises OSError."""
        self.size = size
        self._block = block
        self._count = -(-size // block)
        self._paths = (stem.with_suffix(".data"), stem.with_suffix(".sums"))
        # Only the first is locked as a whole: a file server may take such a lock for one of all bytes, and bytes of the
        # second are locked one by one.
        self._data = _opened(self._paths[0], size, locked=True)
        self._sums = _opened(self._paths[1], _SUM * (1 + self._count))
        os.utime(self._paths[1])
        self._good: set[int] = set()  # blocks whose sums this process has looked at
        self._locks = [threading.Lock() for _ in range(self._count)]

    @property
    def missing(self) -> int:
        """Blocks that were not fetched yet."""
        sums = os.pread(self._sums, _SUM * self._count, _SUM)
        return sum(sums[at : at + _SUM] == _NOTHING for at in range(0, len(sums), _SUM))

    @property
    def blocks(self) -> int:
        return self._count

    def read(self, start: int, length: int, fetch: Fetch) -> bytes:
        """Raises what ``fetch`` raises, and CacheFull."""
        for block in range(start // self._block, -(-(start + length) // self._block)):
            self._make_good(block, fetch)
        return os.pread(self._data, length, start)

    def fill(self, fetch: Fetch) -> None:
        """Fetch what is missing. Raises as ``read``."""
        for block in range(self._count):
            self._make_good(block, fetch)

    def take_whole(self, pieces: Iterator[bytes]) -> None:
        """The whole file from a server that gives no parts. Raises what ``pieces`` raises, and CacheFull."""
        rest = b""
        for block in range(self._count):
            wanted = self._length(block)
            held, got = [rest], len(rest)
            while got < wanted:
                piece = next(pieces, b"")
                if not piece:
                    raise StoreUnreachable(f"the file ended after {block * self._block + got} bytes")
                held.append(piece)
                got += len(piece)
            joined = b"".join(held)
            rest = joined[wanted:]
            self._store(block, iter([joined[:wanted]]))
        if rest or next(pieces, b""):
            raise StoreUnreachable(f"the file has more than the {self.size} bytes that were announced")

    def is_known(self, sha256: str) -> bool:
        """An earlier look has found the whole file to have this sum."""
        return os.pread(self._sums, _SUM, 0).hex() == sha256

    def matches(self, sha256: str) -> bool:
        """Whether the whole file, of which nothing is missing, has this sum; remembered if it has."""
        digest = hashlib.sha256()
        for start in range(0, self.size, _PIECE):
            digest.update(os.pread(self._data, min(_PIECE, self.size - start), start))
        if digest.hexdigest() != sha256:
            return False
        os.pwrite(self._sums, digest.digest(), 0)
        return True

    def forget(self) -> None:
        """What is on the volume is of no use: the next one who opens it begins anew."""
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _length(self, block: int) -> int:
        return min(self._block, self.size - block * self._block)

    def _make_good(self, block: int, fetch: Fetch) -> None:
        with self._locks[block]:
            if block in self._good:
                return
            with _locked(self._sums, block):
                if not self._is_whole(block):
                    self._store(block, fetch(block * self._block, self._length(block)))
            self._good.add(block)

    def _is_whole(self, block: int) -> bool:
        known = os.pread(self._sums, _SUM, _SUM * (1 + block))
        if known == _NOTHING:
            return False
        held = os.pread(self._data, self._length(block), block * self._block)
        return hashlib.sha256(held).digest() == known

    def _store(self, block: int, pieces: Iterator[bytes]) -> None:
        digest, at = hashlib.sha256(), block * self._block
        for piece in pieces:
            digest.update(piece)
            try:
                written = 0
                while written < len(piece):
                    written += os.pwrite(self._data, piece[written:], at + written)
            except OSError as error:
                raise CacheFull(str(error)) from None
            at += len(piece)
        os.pwrite(self._sums, digest.digest(), _SUM * (1 + block))


def _opened(path: Path, size: int, *, locked: bool = False) -> int:
    """A descriptor of a file that has its name still; ``locked``: it holds a shared lock, where the volume knows any."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            if locked:
                fcntl.flock(handle, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(handle).st_ino:
                if os.fstat(handle).st_size != size:
                    os.ftruncate(handle, size)
                return handle
        os.close(handle)


def _remove_unused(data: Path) -> bool:
    try:
        with data.open("r+b") as file:  # a file server locks nothing for one who may only read
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data.with_suffix(".sums").unlink(missing_ok=True)
            data.unlink(missing_ok=True)
    except OSError:  # in use, or gone
        return False
    return True


@contextlib.contextmanager
def _locked(handle: int, block: int) -> Iterator[None]:
    """A lock of the open file, so that threads with descriptors of their own exclude each other, too. A volume that knows
    no such locks costs a block that is fetched twice, which does no harm: the bytes are the same."""
    held = False
    with contextlib.suppress(OSError):
        fcntl.fcntl(handle, fcntl.F_OFD_SETLKW, _lock_of(fcntl.F_WRLCK, block))
        held = True
    try:
        yield
    finally:
        if held:
            fcntl.fcntl(handle, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_UNLCK, block))


def _lock_of(kind: int, block: int) -> bytes:
    """``struct flock`` of the byte that stands for ``block``."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, _SUM * (1 + block), 1, 0)


def _taken(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _room_of(folder: Path) -> tuple[int, int]:
    figures = os.statvfs(folder)
    return figures.f_bavail * figures.f_frsize, figures.f_blocks * figures.f_frsize
