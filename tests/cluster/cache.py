"""Artefacts that are slow to make, kept between runs and shared by all checkouts of one user.

An artefact is a file or a folder under ``${XDG_CACHE_HOME:-~/.cache}/mlora-operator`` whose name ends in a
hash of all that it is made from. It is built beside its place and renamed into it, so a killed build leaves
no artefact that looks whole, and a lock per name keeps two checkouts from building the same thing at once.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """Folder that holds all artefacts."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlora-operator"


def artefact(name: str, made_from: bytes, build: Callable[[Path], None], root: Path | None = None) -> Path:
    """Path of the artefact ``name``; ``build`` makes it at the path it is given when it is not there yet.

    ``made_from`` is everything that decides what the artefact looks like: a change of it builds a new one.
    """
    folder = root or cache_root()
    place = folder / f"{name}-{hashlib.sha256(made_from).hexdigest()[:12]}"
    if place.exists():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f".{name}.lock"):
        if not place.exists():  # another run may have made it while this one waited
            unfinished = folder / f".{place.name}.unfinished"
            remove(unfinished)
            build(unfinished)
            unfinished.rename(place)
    return place


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file lock ``path``; the kernel gives it back when the process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def remove(path: Path) -> None:
    """Remove a file or a folder with all it holds; nothing there is fine too."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
