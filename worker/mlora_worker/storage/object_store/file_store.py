"""Objects that are files on a local disk, under ``file://`` addresses."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import (
    AccessRefused,
    ObjectNotFound,
    StorageError,
    StoreUnreachable,
    TooLarge,
    UselessAnswer,
)
from mlora_worker.storage.limits import Listing, Oversized
from mlora_worker.storage.uri import file_path, file_uri

PIECE = 8 * 2**20
NO_SPACE = {
    errno.ENOSPC: "no space left on that volume",
    errno.EDQUOT: "the quota of that volume is exhausted",
    errno.EFBIG: "the file is too large for that volume",
}
# A network file system whose server is away, or a disk that does not answer.
_SILENT = {
    errno.EIO,
    getattr(errno, "EREMOTEIO", errno.EIO),  # Linux alone has it
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
}
_UNFINISHED = ".partial"


class FileStore:
    """Writes go to a hidden file in the same folder, which is then renamed: a reader sees all of an object or
    none. ``private``: only the owner may read what is written.
    """

    def __init__(
        self, missing: FailureReason = FailureReason.DATASET_NOT_FOUND, *, private: bool = False
    ) -> None:
        self._missing = missing
        self._file_mode, self._folder_mode = (0o600, 0o700) if private else (0o666, 0o777)

    def read(self, uri: str, most: int) -> bytes:
        with self._explained(uri, "read"), _opened(file_path(uri)) as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise TooLarge(uri, most)
        return data

    def read_range(self, uri: str, start: int, length: int) -> bytes:
        with self._explained(uri, "read"), _opened(file_path(uri)) as file:
            file.seek(start)
            data = file.read(length)
        if len(data) != length:
            raise UselessAnswer(
                f"{uri} is shorter than expected: wanted {length} bytes from {start}, got {len(data)}",
            )
        return data

    def pieces(self, uri: str) -> Iterator[bytes]:
        with self._explained(uri, "read"), _opened(file_path(uri)) as file:
            while piece := file.read(PIECE):
                yield piece

    def size(self, uri: str) -> int:
        with self._explained(uri, "read"):
            return file_path(uri).stat().st_size

    def version(self, uri: str) -> str:
        with self._explained(uri, "read"), _opened(file_path(uri)) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def origin(self, uri: str) -> str:
        del uri
        return ""

    def exists(self, uri: str) -> bool:
        with self._explained(uri, "read"):
            return file_path(uri).is_file()

    def write(self, uri: str, data: bytes) -> None:
        with self._replacing(uri) as file:
            file.write(data)

    def write_file(self, uri: str, path: Path) -> None:
        with self._replacing(uri) as file, path.open("rb") as source:
            shutil.copyfileobj(source, file, PIECE)

    def delete(self, uri: str) -> None:
        with self._explained(uri, "delete"):
            file_path(uri).unlink(missing_ok=True)

    def list(self, prefix: str, most: int) -> list[str]:
        listing = Listing(most)
        with self._explained(prefix, "list"):
            for path in file_path(prefix).rglob("*"):
                if path.is_file() and path.suffix != _UNFINISHED:
                    listing.add(file_uri(path))
        return sorted(listing.names)

    @contextlib.contextmanager
    def _replacing(self, uri: str) -> Iterator[BinaryIO]:
        target = file_path(uri)
        with self._explained(uri, "write"):
            # Of a writer that was killed: an object of a store has one writer only.
            for leftover in target.parent.glob(f".{_literal(target.name)}.*{_UNFINISHED}"):
                leftover.unlink(missing_ok=True)
            _make_folders(target.parent, self._folder_mode)
            with replacing(target, self._file_mode) as file:
                yield file

    @contextlib.contextmanager
    def _explained(self, uri: str, action: str) -> Iterator[None]:
        try:
            yield
        except Oversized as error:
            raise UselessAnswer(f"cannot {action} {uri}: the folder {error}") from None
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectNotFound(
                self._missing, f"{uri} does not exist: correct the address or put the file there"
            ) from None
        except IsADirectoryError:
            raise ObjectNotFound(self._missing, f"{uri} is a folder: give the path of a file in it") from None
        except PermissionError:
            raise AccessRefused(f"may not {action} {uri}: the file's owner or mode forbids it") from None
        except OSError as error:
            if error.errno in NO_SPACE:
                raise StorageError(
                    FailureReason.INSUFFICIENT_SPACE,
                    f"cannot write {uri}: {NO_SPACE[error.errno]}; make room there",
                ) from None
            if error.errno in _SILENT:
                raise StoreUnreachable(f"cannot {action} {uri}: {error.strerror}; check its volume") from None
            reason = FailureReason.UPLOAD_FAILED if action == "write" else FailureReason.STORAGE_UNREACHABLE
            raise StorageError(
                reason, f"cannot {action} {uri}: {error.strerror or type(error).__name__}"
            ) from None


@contextlib.contextmanager
def replacing(target: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file that takes the place of ``target`` when the block ends well, and vanishes when it does not.
    Several processes may do so at once: the last one's file stays, whole. ``mode`` is that of a new file, less the
    process's mask.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}{_UNFINISHED}")
    try:
        with open(unfinished, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
        _sync_folder(target.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def move_into_place(source: Path, target: Path) -> None:
    """Make the file ``source``, on the same volume, ``target``: for its owner only, and once it is on the disk. Raises
    OSError."""
    _make_folders(target.parent, 0o700)
    source.chmod(0o600)
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(target)
    _sync_folder(target.parent)


def _make_folders(folder: Path, mode: int) -> None:
    """Like ``mkdir(parents=True)``, which gives ``mode`` to the last folder only."""
    for missing in reversed([folder, *folder.parents]):
        missing.mkdir(mode=mode, exist_ok=True)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """To be read. What is no file, such as a pipe, would keep its reader for ever."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        yield file


def _literal(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _sync_folder(folder: Path) -> None:
    """A rename survives a power cut only when the folder itself is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
