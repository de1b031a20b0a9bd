"""Where a download collects its files: a folder beside the target that a later try goes on with."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlora_operator.download.errors import AdapterCorrupt, FolderInUse
from mlora_operator.download.manifest import Manifest


@contextmanager
def partial(target: Path, manifest: Manifest) -> Iterator[Path]:
    """The folder for the files of ``manifest``, with what a former try left in it.

    Its name is made of the manifest, so that files of another adapter are never taken up; folders of other
    manifests are removed. It is locked: a second download to ``target`` at the same time gets FolderInUse. What
    is found corrupt is removed at the end; after any other error the folder stays for the next try.
    """
    identity = hashlib.sha256(manifest.content).hexdigest()[:12]
    folder = target.parent / f".{target.name}.partial-{identity}"
    lock = _locked(folder, target)
    try:
        for other in target.parent.glob(f".{_literal(target.name)}.partial-*"):
            if other != folder:
                _remove_unless_locked(other)
        wanted = {file.name for file in manifest.files}
        for stray in [path for path in folder.iterdir() if path.name not in wanted]:
            stray.unlink()
        yield folder
    except AdapterCorrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _locked(folder: Path, target: Path) -> int:
    """An open descriptor of ``folder`` that holds its lock."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # the other download has just put it in place
            continue
        if not _lock(descriptor):
            os.close(descriptor)
            raise FolderInUse(f"another download to {target} is in progress: wait for it to finish")
        try:
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """False when another process has it. File systems without locks are used without."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _remove_unless_locked(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        if _lock(descriptor):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _literal(name: str) -> str:
    """``name`` with nothing in it that a pattern would read."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
