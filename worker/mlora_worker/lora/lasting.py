"""Tensors that outlast many microbatches lie apart from those that come and go with each.

On the CPU the C library keeps what a microbatch frees for the next one (``allocator.py``). A block that stays, taken from
the midst of it, cuts the free room in two, and when its task ends the room around it may be in use: after 170 tasks of all
sizes half of the heap was free, and no block of 12 MiB was left in it. So what stays gets a mapping of its own, which goes
back to the kernel as a whole. On CUDA torch's allocator keeps small and large blocks apart by itself.
"""

from __future__ import annotations

import errno
import mmap

import torch
from torch import Tensor

_SMALL = 2**16  # bytes: a mapping has whole pages, and there is a limit to their number


def lasting_zeros(elements: int, device: torch.device) -> Tensor:
    """[elements] float32. Raises what torch raises, or MemoryError, when there is no memory for it."""
    size = 4 * elements
    if device.type != "cpu" or size < _SMALL:
        return torch.zeros(elements, device=device)
    return torch.frombuffer(_mapping(size), dtype=torch.float32)


def _mapping(size: int) -> mmap.mmap:
    """Of zeros. The tensor holds it, and with the tensor it ends. Private where there is such a thing: a fork has it to
    itself, and it counts against the process's limit (``pipeline/budget.py``)."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        return mmap.mmap(-1, size, **private)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"no memory for {size} bytes that a task holds while it trains") from None
