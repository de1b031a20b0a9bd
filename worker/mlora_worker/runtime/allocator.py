"""The C library's allocator: what a step frees is kept for the next step, or given back where memory has a limit.

By default glibc gives large blocks back to the kernel as soon as they are free, and gets them again, page by page and
zeroed, at the next microbatch. On SmolLM2-135M with 1,760 tokens a microbatch that was 370,000 page faults and more than
a quarter of the time (docs/contributors/numerics.md). CUDA's allocator in torch caches by itself.

All threads share one heap: what the thread that receives has freed would else be kept where the one that computes cannot
have it.

What is kept has a price. Tasks come and go between the blocks of microbatches, and a small block that stays in the midst of
free room cuts it in two. With a hard budget of 384 MiB (``python -m bench oom``) half of the heap was free after 170 tasks,
and no block of 12 MiB was left in it: memory ran out though there was enough. So a process with such a budget
(``pipeline/budget.py``) gives large blocks back, which then have no place in the heap that others could cut.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_NEVER = 2**31 - 1
_LARGEST_FROM_THE_HEAP = 2**30  # bytes
_LARGEST_WITHIN_A_BUDGET = 2**17  # bytes: glibc's own threshold before it grows


def keep_freed_memory() -> bool:
    """From now on, for the whole process. False where the C library has no such knobs (musl, macOS): nothing changes."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, _LARGEST_FROM_THE_HEAP), (_M_TRIM_THRESHOLD, _NEVER), (_M_ARENA_MAX, 1))
    return all(mallopt(setting, value) for setting, value in settings)


def give_back_freed_memory() -> bool:
    """From now on, large blocks go back to the kernel as they are freed, and what is free already goes back where it can.
    False where the C library has no such knobs."""
    try:
        library = ctypes.CDLL(None)
        mallopt, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        return False
    large = _LARGEST_WITHIN_A_BUDGET
    settings = ((_M_MMAP_THRESHOLD, large), (_M_TRIM_THRESHOLD, large), (_M_ARENA_MAX, 1))
    set_all = all(mallopt(setting, value) for setting, value in settings)
    trim(0)
    return set_all


def give_back_small_blocks() -> bool:
    """What is free in the heap goes back to the kernel now. False where the C library cannot."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    trim(0)
    return True


def ask_for_huge_pages() -> None:
    """For large blocks, where the kernel leaves the choice to programs. Getting them anew each time then costs 512 times
    fewer page faults. Takes effect only before torch's first allocation."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
