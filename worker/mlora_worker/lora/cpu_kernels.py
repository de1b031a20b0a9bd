"""Dropout's hash and its application in one pass, where torch's operations need ten.

An element of a mask costs six integer operations. As torch operations each of them goes through memory; compiled together
they cost a tenth (docs/contributors/numerics.md has the figures). Without numba the same bits come from
``DropoutMask.bits``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlora_worker.lora.dropout import MIX_1, MIX_2, MULTIPLIER, DropoutMask, keep
from mlora_worker.runtime.numba_loops import AVAILABLE, compiled, part_of_kernels, spread

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def masked(x: Tensor, mask: DropoutMask) -> Tensor:
    """``x`` [tokens, features] where the mask keeps, 0 elsewhere; contiguous, on the CPU."""
    if not AVAILABLE:
        return keep(x, mask.bits(slice(None)))
    integer = _INTEGER[x.element_size()]
    out = torch.empty_like(x)
    source, target = x.detach().view(integer).numpy(), out.view(integer).numpy()
    keys, features = mask.arrays
    module, threshold = mask.module_key, np.int32(mask.threshold)
    kernel = _kernels().masked
    spread(lambda rows: kernel(source[rows], keys[rows], module, features, threshold, target[rows]), *x.shape)
    return out


def masked_adding(x: Tensor, mask: DropoutMask, total: Tensor, addend: Tensor, factor: float) -> Tensor:
    """As ``masked``; and ``total += factor * addend`` where the mask keeps, which is computed once for both. All [tokens,
    features], contiguous, on the CPU."""
    if not AVAILABLE or x.dtype != torch.float32:
        total.add_(masked(addend, mask), alpha=factor)
        return masked(x, mask)
    out = torch.empty_like(x)
    source, target, onto, added = (one.detach().numpy() for one in (x, out, total, addend))
    keys, features = mask.arrays
    module, threshold, times = mask.module_key, np.int32(mask.threshold), np.float32(factor)
    kernel = _kernels().masked_adding

    def some(rows: slice) -> None:
        own = keys[rows]
        kernel(source[rows], own, module, features, threshold, target[rows], onto[rows], added[rows], times)

    spread(some, *x.shape)
    return out


class _Compiled:
    """Compiled when first used: a worker whose tasks have no dropout never waits for it."""

    def __init__(self) -> None:
        self.masked = compiled(_masked)
        self.masked_adding = compiled(_masked_adding)


@cache
def _kernels() -> _Compiled:
    return _Compiled()


@part_of_kernels
def _row_key(token_key: Any, module_key: Any) -> Any:
    """``DropoutMask.row_keys`` of one token."""
    key = np.int64(token_key ^ module_key)
    key = np.int64((key ^ (key >> 30)) * MIX_1)
    key = np.int64((key ^ (key >> 27)) * MIX_2)
    key ^= key >> 31
    return np.int32(np.int32(key >> 32) | np.int32(1))


@part_of_kernels
def _is_kept(row_key: Any, feature_key: Any, threshold: Any) -> Any:
    """``DropoutMask.bits`` of one element, as a truth value."""
    bits = np.int32(row_key * feature_key)
    bits ^= bits >> np.int32(15)
    bits = np.int32(bits * np.int32(MULTIPLIER))
    bits >>= np.int32(1)
    return bits < threshold


def _masked(x: Any, token_keys: Any, module_key: Any, feature_keys: Any, threshold: Any, out: Any) -> None:
    for token in range(x.shape[0]):
        row_key = _row_key(token_keys[token], module_key)
        for feature in range(x.shape[1]):
            kept = _is_kept(row_key, feature_keys[feature], threshold)
            out[token, feature] = x[token, feature] if kept else 0


def _masked_adding(
    x: Any, token_keys: Any, module_key: Any, feature_keys: Any, threshold: Any, out: Any, total: Any,
    addend: Any, factor: Any,
) -> None:  # fmt: skip
    for token in range(x.shape[0]):
        row_key = _row_key(token_keys[token], module_key)
        for feature in range(x.shape[1]):
            kept = _is_kept(row_key, feature_keys[feature], threshold)
            out[token, feature] = x[token, feature] if kept else np.float32(0)
            total[token, feature] += factor * (addend[token, feature] if kept else np.float32(0))
