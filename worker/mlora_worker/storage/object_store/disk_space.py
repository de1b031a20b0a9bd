"""Is there room on the volumes that a task will write to? Asked before it trains, where the system can be asked."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import StorageError


@dataclass(frozen=True, slots=True)
class Volume:
    device: int  # the kernel's number: two folders with the same one share their space
    free: int  # bytes that this process may still write


@dataclass(frozen=True, slots=True)
class SpaceNeed:
    """``bytes`` that ``what`` takes in ``folder``, which need not exist yet."""

    folder: Path
    bytes: int
    what: str


def volume_of(folder: Path) -> Volume:
    """Of ``folder``, or of the nearest folder above it that exists. Raises OSError."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    figures = os.statvfs(there)
    return Volume(there.stat().st_dev, figures.f_bavail * figures.f_frsize)


def check_space(needs: Iterable[SpaceNeed], volume: Callable[[Path], Volume] = volume_of) -> None:
    """Raises StorageError (InsufficientSpace), with the figures, for the first volume that the ``needs`` on it would fill.
    One that cannot be asked is passed over: the first write will tell.
    """
    free: dict[int, int] = {}
    wanted: dict[int, list[SpaceNeed]] = defaultdict(list)
    for need in needs:
        try:
            found = volume(need.folder)
        except OSError:
            continue
        free[found.device] = found.free
        wanted[found.device].append(need)
    for device, claims in wanted.items():
        total = sum(need.bytes for need in claims)
        if total > free[device]:
            listed = ", ".join(f"{show_size(need.bytes)} for {need.what}" for need in claims)
            raise StorageError(
                FailureReason.INSUFFICIENT_SPACE,
                f"the volume of {claims[0].folder} has {show_size(free[device])} free, and the task needs "
                f"{show_size(total)} there ({listed}): make room, lower lora.rank, adapt fewer modules, or choose another "
                "output.uri",
            )


def show_size(count: int) -> str:
    """In MiB with one decimal, as ``df -m`` would be compared with; smaller ones in KiB."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
