"""A hard limit on the memory of a rank: beyond it, allocations fail as they do on a full device.

On CUDA torch's allocator keeps it. On the CPU the kernel does (``RLIMIT_DATA``): the process may grow, from where it is
with its model loaded, by what the budget leaves beside the model, and a little for what is no tensor (``OWN_GROWTH``).
The kernel counts the whole stack of a thread, used or not, so those that start later get small ones. It counts blocks that
were freed and kept, too, so a process with a budget does not keep large ones (``allocator.py``). A failed allocation is a
fault like any other lack of memory (``faults.py``).
"""

from __future__ import annotations

import logging
import resource
import threading
from pathlib import Path

import torch

from mlora_worker.runtime.allocator import give_back_freed_memory

log = logging.getLogger(__name__)

_STACK = 512 * 2**10  # bytes; torch's own threads are there already, Python's need little
_THREADS = 56  # most that start later: requests, what is fetched; pools are there before (threads.py)
OWN_GROWTH = 32 * 2**20 + _THREADS * _STACK  # bytes: Python's objects, and stacks


def limit_memory(device: torch.device, budget: int, resident: int) -> bool:
    """``budget``: bytes of this rank, of which the model takes ``resident``. False where it cannot be set. Raises
    ValueError when not even the model fits."""
    if budget <= resident:
        raise ValueError(
            f"a memory budget of {budget} bytes is less than the model's {resident} on this stage"
        )
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
        return True
    give_back_freed_memory()
    used = _data_bytes()
    if used is None:
        return False
    limit = used + budget - resident + OWN_GROWTH
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard not in (resource.RLIM_INFINITY, -1):
        limit = min(limit, hard)
    threading.stack_size(_STACK)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    log.info("memory budget: %d bytes, %d beside the model", budget, budget - resident)
    return True


def _data_bytes() -> int | None:
    """What RLIMIT_DATA counts; None where the kernel does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), None)
