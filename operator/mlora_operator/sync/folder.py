"""The folder in which adapters are shown.

    FOLDER/support-bot                         a symbolic link to the version that is shown
    FOLDER/.versions/support-bot/DIGEST/       that version, whole and verified; DIGEST is made of its manifest

Each version has a path of its own, because servers remember what they computed with an adapter by its path. A name changes
from one version to the next by renaming a link, so a reader gets the former version or the new one. The former one stays
until the next pass, for readers that have just opened it, and as long as a server has it loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path

from mlora_operator.download import AdapterSource, FolderInUse, Manifest, download
from mlora_operator.sync.places import is_usable

VERSIONS = ".versions"
_DIGEST = re.compile(r"[0-9a-f]{32}")
Version = tuple[str, str]  # name and digest


class FolderLocked(FolderInUse):
    """Another ``mlora sync`` looks after this folder."""


@contextmanager
def open_folder(folder: Path) -> Iterator[ShownAdapters]:
    """Makes it where it is not there yet. One at a time: raises FolderLocked; FolderInUse where it cannot be written."""
    versions = folder.absolute() / VERSIONS
    try:
        versions.mkdir(parents=True, exist_ok=True)
        lock = os.open(versions, os.O_RDONLY)
    except OSError as error:
        raise FolderInUse(f"{folder} cannot be written: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderLocked(
                f"another `mlora sync` is working on {folder}: end it, or choose another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield ShownAdapters(folder.absolute())
    finally:
        os.close(lock)


class ShownAdapters:
    """All methods raise FolderInUse where the folder cannot be read or written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._verified: set[Version] = set()  # by this process

    def shown(self) -> dict[str, str]:
        """The digest of each adapter that is shown here, by name. What others have put here is not among them."""
        with _writing(self.folder):
            return {
                path.name: digest
                for path in sorted(self.folder.iterdir())
                if (digest := self._digest_behind(path)) is not None
            }

    def path(self, name: str, digest: str) -> str:
        """Of a version, from the folder."""
        return f"{VERSIONS}/{name}/{digest}"

    def add(
        self, name: str, manifest: Manifest, source: AdapterSource, pause: Callable[[float], None]
    ) -> bool:
        """Fetch, verify and show; False where just this is shown already, and was verified. Raises DownloadError."""
        digest = digest_of(manifest)
        with _writing(self.folder):
            link = self.folder / name
            if (link.exists() or link.is_symlink()) and self._digest_behind(link) is None:
                raise FolderInUse(f"{link} is not of `mlora sync`: remove it, or choose another folder")
            target = self.folder / self.path(name, digest)
            if (name, digest) not in self._verified or not target.is_dir():
                self._check_space(name, manifest, target)
                download(source, manifest, target, pause)
                self._verified.add((name, digest))
            if self._digest_behind(link) == digest:
                return False
            self._point(link, self.path(name, digest))
            return True

    def hide(self, name: str) -> None:
        with _writing(self.folder):
            (self.folder / name).unlink(missing_ok=True)

    def remove_others(self, keep: Set[Version]) -> None:
        """Remove all versions but these, and what broken-off downloads of other names have left."""
        with _writing(self.folder):
            for of_name in (self.folder / VERSIONS).iterdir():
                kept = {digest for name, digest in keep if name == of_name.name}
                if not kept:
                    shutil.rmtree(of_name, ignore_errors=True)
                    continue
                for version in of_name.iterdir():
                    if version.name not in kept and _DIGEST.fullmatch(version.name):
                        shutil.rmtree(version, ignore_errors=True)
            self._verified &= keep

    def _digest_behind(self, link: Path) -> str | None:
        """None for all that is no link of ours to a version that is there."""
        if not link.is_symlink() or not is_usable(link.name):
            return None
        parts = str(link.readlink()).split("/")
        ours = len(parts) == 3 and parts[:2] == [VERSIONS, link.name] and _DIGEST.fullmatch(parts[2])
        return parts[2] if ours and link.is_dir() else None

    def _point(self, link: Path, target: str) -> None:
        """In one step, also where a link is already."""
        new = self.folder / VERSIONS / ".link"
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        new.rename(link)

    def _check_space(self, name: str, manifest: Manifest, target: Path) -> None:
        """Raises FolderInUse before a download that cannot end, and would fill the volume of whoever shares it."""
        there = sum(
            path.stat().st_size for path in target.parent.glob(f"*{target.name}*/*") if path.is_file()
        )
        free = shutil.disk_usage(self.folder).free
        if manifest.bytes - there > free:
            raise FolderInUse(
                f"{name} needs {manifest.bytes:,} bytes, and {self.folder} has {free:,} left: make room, or choose another "
                f"folder"
            )


def digest_of(manifest: Manifest) -> str:
    return hashlib.sha256(manifest.content).hexdigest()[:32]


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FolderInUse(f"{folder} cannot be written: {error.strerror or error}") from error
