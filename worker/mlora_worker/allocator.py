"""The C library's allocator keeps what a step frees for the next step.

By default glibc gives large blocks back to the kernel as soon as they are free, and gets them again, page by page and
zeroed, at the next microbatch. On SmolLM2-135M with 1,760 tokens a microbatch that was 370,000 page faults and more than
a quarter of the time (docs/contributors/numerics.md). CUDA's allocator in torch caches by itself.

All threads share one heap: what the thread that receives has freed would else be kept where the one that computes cannot
have it.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_NEVER = 2**31 - 1
_LARGEST_FROM_THE_HEAP = 2**30  # bytes


def keep_freed_memory() -> bool:
    """From now on, for the whole process. False where the C library has no such knobs (musl, macOS): nothing changes."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, _LARGEST_FROM_THE_HEAP), (_M_TRIM_THRESHOLD, _NEVER), (_M_ARENA_MAX, 1))
    return all(mallopt(setting, value) for setting, value in settings)
