"""What this machine has to share out among local ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    cpus: int
    memory_bytes: int
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them

    def threads_of(self, stages: int) -> int:
        """Threads of each of ``stages`` ranks, so that together they do not fight for the processors."""
        return max(1, self.cpus // stages)

    def gpu_of(self, rank: int) -> str | None:
        """The GPU of a rank; ranks share when there are more of them than GPUs."""
        return self.gpus[rank % len(self.gpus)] if self.gpus else None


def this_machine(environment: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Reads /dev, /sys and the process's own limits; ``root`` is another tree in tests."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        gpus = tuple(name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip())
    else:
        found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in (root / "dev").glob("nvidia*"))
        gpus = tuple(sorted((match[1] for match in found if match), key=int))
    return Machine(cpus=len(os.sched_getaffinity(0)), memory_bytes=_memory_bytes(root), gpus=gpus)


def _memory_bytes(root: Path) -> int:
    """The container's limit where there is one, else the machine's memory."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return min(int((root / path).read_text()), machine)
        except (OSError, ValueError):  # no such hierarchy, or "max"
            continue
    return machine
