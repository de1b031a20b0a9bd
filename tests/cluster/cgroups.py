"""The control group that holds a cluster's pods: the only thing of a node that outlives its processes."""

import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "mlora-test-"


def hierarchies() -> Iterator[Path]:
    """Roots of the machine's hierarchies: one with version 2, one a controller with version 1."""
    if (ROOT / "cgroup.controllers").exists():
        yield ROOT
        return
    for folder in ROOT.iterdir():
        if folder.is_dir() and not folder.is_symlink() and (folder / "cgroup.procs").exists():
            yield folder


def group_of(identity: str) -> str:
    """Name of the group of the cluster with this identity (``State.identity``)."""
    return PREFIX + identity


def existing() -> set[str]:
    """Names of the groups of all clusters, also of those that are no more."""
    return {group.name for hierarchy in hierarchies() for group in hierarchy.glob(f"{PREFIX}*")}


def create(name: str) -> None:
    """Make the group in every hierarchy; kubelet wants it there before it starts."""
    for hierarchy in hierarchies():
        (hierarchy / name).mkdir(exist_ok=True)


def remove(name: str, patience: float = 10.0) -> None:
    """Remove the group with all groups below it, waiting up to ``patience`` seconds for dying processes."""
    deadline = time.monotonic() + patience
    for hierarchy in hierarchies():
        top = hierarchy / name
        # The kernel keeps the files of a group; only the folders are removed, the deepest first.
        folders = sorted([top, *(path for path in top.rglob("*") if path.is_dir())], reverse=True)
        for folder in folders:
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
