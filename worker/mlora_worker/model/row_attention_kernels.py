"""What ``row_attention`` does between its products: one pass over a block of scores, in place.

Exponents are powers of two by a polynomial, which compilers turn into the processor's widest instructions: a third of the
time of torch's ``exp``. NaN stays NaN: a task that diverges must not look well.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from mlora_worker.runtime.numba_loops import AVAILABLE, compiled, part_of_kernels, spread

__all__ = ["AVAILABLE", "slopes", "softmax"]

_LOG2_E = 1.4426950408889634
# Taylor's series of 2^f, by falling powers; for -0.5 <= f < 0.5 off by 2e-7 at most.
_C6, _C5, _C4, _C3, _C2, _C1, _C0 = (
    np.float32(one)
    for one in (
        0.00015403530393381608, 0.0013333558146428443, 0.009618129107628477, 0.05550410866482158,
        0.2402265069591007, 0.6931471805599453, 1.0,
    )
)  # fmt: skip
_LEAST = np.float32(-126.0)  # of an exponent of two that a normal number has


def softmax(
    scores: Tensor, own: slice, keys: slice, window: int | None, scale: float, log: Tensor, inverse: Tensor
) -> None:
    """``scores`` [key heads, groups * queries, keys] become exponents, 0 where a query does not see a key.

    ``own``, ``keys``: which tokens these are. Of each query, ``log`` gets the logarithm to base 2 of the sum of exponents,
    and ``inverse`` one over the sum of those in ``scores``, which are relative to the largest.
    """
    flat = scores.view(-1, scores.shape[-1]).numpy()
    whole, kernel = flat.view(np.int32), _kernels().softmax
    place, logs, inverses = _place(own, keys, window, scale), log.numpy(), inverse.numpy()
    spread(lambda rows: kernel(flat, whole, rows.start, rows.stop, *place, logs, inverses), *flat.shape)


def slopes(
    weights: Tensor,
    slopes: Tensor,
    own: slice,
    keys: slice,
    window: int | None,
    scale: float,
    log: Tensor,
    dot: Tensor,
) -> None:
    """Scores ``weights`` become probabilities p, and gradients g of these in ``slopes`` those of scores: p (g - ``dot``).

    ``dot`` [queries]: of the output and its gradient; both 0 where a query does not see a key.
    """
    flat, other = (one.view(-1, one.shape[-1]).numpy() for one in (weights, slopes))
    place, logs, dots, kernel = _place(own, keys, window, scale), log.numpy(), dot.numpy(), _kernels().slopes
    spread(lambda rows: kernel(flat, other, rows.start, rows.stop, *place, logs, dots), *flat.shape)


def _place(own: slice, keys: slice, window: int | None, scale: float) -> tuple[int, int, int, np.float32]:
    """As the loops take it: the first query's place among the keys, how many queries, the window or 0, and what a score is
    multiplied by to be an exponent of two."""
    return own.start - keys.start, own.stop - own.start, window or 0, np.float32(scale * _LOG2_E)


class _Compiled:
    def __init__(self) -> None:
        self.softmax = compiled(_softmax, reorder_sums=True)
        self.slopes = compiled(_slopes, reorder_sums=True)


@cache
def _kernels() -> _Compiled:
    return _Compiled()


@part_of_kernels
def _power(exponent: Any) -> Any:
    """2^exponent for an exponent up to 0; below 2^-126 it is 2^-126, and NaN of NaN."""
    bounded = max(np.float32(exponent), _LEAST)  # in this order NaN stays
    whole = np.floor(bounded + np.float32(0.5))
    f = np.float32(bounded - whole)
    p = _C6
    p = np.float32(p * f + _C5)
    p = np.float32(p * f + _C4)
    p = np.float32(p * f + _C3)
    p = np.float32(p * f + _C2)
    p = np.float32(p * f + _C1)
    p = np.float32(p * f + _C0)
    scale = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(p * scale)


@part_of_kernels
def _seen(row: Any, first: Any, queries: Any, window: Any) -> Any:
    """Which keys a query sees: from the first one on to before the second."""
    end = first + row % queries + 1
    return (max(0, end - window) if window else 0), end


@part_of_kernels
def _in_order(bits: Any) -> Any:
    """A float32's bits as an integer that is the larger, the larger the number is; and back. Compilers find the largest
    integer in many lanes, and the largest number one by one."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


def _softmax(
    scores: Any, bits: Any, start: Any, stop: Any, first: Any, queries: Any, window: Any, base: Any, log: Any,
    inverse: Any,
) -> None:  # fmt: skip
    for row in range(start, stop):
        begin, end = _seen(row, first, queries, window)
        # Loops that begin at 0: an index that may be negative would keep them from wide instructions.
        own, own_bits = scores[row, begin:end], bits[row, begin:end]
        highest = np.int32(-0x80000000)
        for key in range(len(own)):
            highest = max(highest, _in_order(own_bits[key]))
        most = np.float32(np.int32(_in_order(highest)).view(np.float32) * base)
        for key in range(len(own)):
            own[key] = _power(np.float32(own[key] * base) - most)
        total = np.float32(0)
        for key in range(len(own)):
            total += own[key]
        scores[row, :begin] = 0
        scores[row, end:] = 0
        log[row] = most + np.log2(total)
        inverse[row] = np.float32(1) / total


def _slopes(
    weights: Any, slopes: Any, start: Any, stop: Any, first: Any, queries: Any, window: Any, base: Any, log: Any,
    dot: Any,
) -> None:  # fmt: skip
    for row in range(start, stop):
        begin, end = _seen(row, first, queries, window)
        own, other = weights[row, begin:end], slopes[row, begin:end]
        log_of_row, dot_of_row = log[row], dot[row]
        for key in range(len(own)):
            own[key] = _power(np.float32(own[key] * base) - log_of_row)
        for key in range(len(own)):
            other[key] = own[key] * (other[key] - dot_of_row)
        for both in (weights[row], slopes[row]):
            both[:begin] = 0
            both[end:] = 0
