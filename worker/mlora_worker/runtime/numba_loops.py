"""Loops over a CPU's memory, compiled by numba: one pass where torch's operations would need several.

numba compiles in a second, needs no C compiler at run time, and keeps what it compiled on disk where it may write. It may
be missing (a GPU's worker can do without): then ``AVAILABLE`` is False, and callers use torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

try:
    import numba
except ImportError:
    numba = None

AVAILABLE = numba is not None
_WORTH_A_THREAD = 2**17  # elements


def compiled(function: Callable[..., None], *, reorder_sums: bool = False) -> Any:
    """``function`` as machine code that runs without Python's lock; compiled at its first call.

    ``reorder_sums``: sums may be taken in lanes. The order is fixed by the code, so it is the same in every run.
    """
    fastmath = {"contract", "reassoc", "nsz"} if reorder_sums else {"contract"}
    # numpy's rules for errors: a division by zero gives infinity, and integers wrap.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # no folder to keep it in
        return numba.njit(function, **options)


def part_of_kernels(function: Callable[..., Any]) -> Any:
    """``function``, to be called by functions that ``compiled`` is given: it becomes a part of each."""
    return numba.njit(function, nogil=True, error_model="numpy") if AVAILABLE else function


def spread(work: Callable[[slice], None], rows: int, features: int) -> None:
    """``work`` over all rows, on as many threads as torch has where there is enough to do."""
    threads = min(torch.get_num_threads(), rows * features // _WORTH_A_THREAD)
    if threads <= 1:
        work(slice(0, rows))
        return
    step = -(-rows // threads)
    list(_pool(threads).map(work, [slice(start, start + step) for start in range(0, rows, step)]))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "compiled")
