"""Fetching the files of an adapter, each verified, all or none."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from mlora_operator.download.errors import AdapterCorrupt, AdapterNotFound, FolderInUse, StoreSilent
from mlora_operator.download.manifest import MANIFEST_NAME, AdapterFile, Manifest, check_loadable
from mlora_operator.download.partial import partial
from mlora_operator.download.source import PIECE, AdapterSource
from mlora_operator.download.swap import put_in_place

Progress = Callable[[int], None]
Pause = Callable[[float], None]

_TRIES = 5  # without a byte in between


def download(
    source: AdapterSource, manifest: Manifest, target: Path, pause: Pause, progress: Progress = lambda _: None
) -> None:
    """Fetch and verify all files, then put them at ``target``; a former adapter there is replaced.

    ``progress`` is told the bytes of each piece, fetched now or by a former try. When all is there already,
    nothing is fetched. Until all is verified, nothing at ``target`` changes; what a broken-off download has got
    stays in ``.NAME.partial-*`` beside it, and the next one goes on from there. Raises DownloadError.
    """
    check_loadable(manifest)
    target = target.resolve()  # so that a symbolic link stays one
    check_replaceable(target)
    try:
        if _holds(target, manifest):
            progress(manifest.bytes)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial(target, manifest) as folder:
            for file in manifest.files:
                _fetch(source, file, folder / file.name, pause, progress)
            with (folder / MANIFEST_NAME).open("wb") as output:
                output.write(manifest.content)
                output.flush()
                os.fsync(output.fileno())
            put_in_place(folder, target)
    except OSError as error:
        raise FolderInUse(f"{target} cannot be written: {error.strerror or error}") from error


def check_replaceable(target: Path) -> None:
    """Raises FolderInUse when there is something at ``target`` that is no adapter, or that cannot be moved."""
    if not target.exists():
        return
    if not target.is_dir():
        raise FolderInUse(f"{target} is a file")
    if target.is_mount():
        message = f"{target} is a mount point, which cannot be replaced atomically; use {target / 'adapter'}"
        raise FolderInUse(message)
    if any(target.iterdir()) and not (target / MANIFEST_NAME).is_file():
        raise FolderInUse(
            f"{target} contains something that is not an adapter; empty it or choose another folder"
        )


def _holds(target: Path, manifest: Manifest) -> bool:
    """Whether this very adapter lies there already, and nothing else."""
    names = {path.name for path in target.iterdir()} if target.is_dir() else set()
    if names != {MANIFEST_NAME, *(file.name for file in manifest.files)}:
        return False
    if (target / MANIFEST_NAME).read_bytes() != manifest.content:
        return False
    return all(
        (target / file.name).stat().st_size == file.bytes and _digest(target / file.name) == file.sha256
        for file in manifest.files
    )


class _Count:
    """Tells ``progress`` each byte of a file once, also when some are fetched again."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._told = 0

    def reached(self, size: int) -> None:
        if size > self._told:
            self._progress(size - self._told)
            self._told = size


def _fetch(source: AdapterSource, file: AdapterFile, path: Path, pause: Pause, progress: Progress) -> None:
    """``file`` to ``path``, from where a former try ended. Raises StoreSilent, StoreRefused, AdapterCorrupt."""
    count = _Count(progress)
    if _size(path) > file.bytes:  # not the beginning of this file
        path.unlink()
    had = _size(path)
    try:
        _complete(source, file, path, pause, count)
        if had and _digest(path) != file.sha256:
            path.unlink()  # what the former try got was of another object
            _complete(source, file, path, pause, count)
    except AdapterNotFound as error:
        raise AdapterCorrupt(f"{file.name} is in the manifest but not in the store") from error
    size = _size(path)
    if size != file.bytes:
        more = " or more" if size > file.bytes else ""
        raise AdapterCorrupt(f"{file.name} has {size} bytes{more} where the manifest says {file.bytes}")
    if _digest(path) != file.sha256:
        raise AdapterCorrupt(f"{file.name} does not match the SHA-256 in its manifest")


def _complete(source: AdapterSource, file: AdapterFile, path: Path, pause: Pause, count: _Count) -> None:
    """Appends what is missing; goes on after each break, unless nothing comes between ``_TRIES`` of them."""
    failures, reached = 0, _size(path)
    while True:
        try:
            _append(source, file, path, count)
            return
        except StoreSilent:
            failures, reached = (failures + 1 if _size(path) == reached else 1), _size(path)
            if failures >= _TRIES:
                raise
            pause(min(2.0**failures / 2, 10.0))


def _append(source: AdapterSource, file: AdapterFile, path: Path, count: _Count) -> None:
    with path.open("ab") as output:
        size = output.tell()
        count.reached(size)
        if size < file.bytes or size == 0:
            for piece in source.read(file.name, size):
                output.write(piece)
                size += len(piece)
                count.reached(size)
                if size > file.bytes:
                    break
        output.flush()
        os.fsync(output.fileno())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while piece := content.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
