"""Dropout masks as a pure function of (task seed, step, row, position, module, feature).

Nothing is drawn and nothing is stored: backward computes the mask again. As only the task's own counters go
in, a mask does not depend on neighbours, on how a mini-batch was cut, on the number of stages, or on the
device.

Each token has a 32-bit key (a strong mix of its counters with the module's name) and each feature has one. An
element's bits are a mix of the product of its two keys, so an element costs six integer operations that
vectorise, far less than a random number generator (measured in docs/contributors/numerics.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Integers = TypeVar("Integers", Tensor, npt.NDArray[np.int64])

# Odd multipliers of splitmix64's finalizer and of Knuth's multiplicative hash, as signed integers.
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MULTIPLIER = 0x9E3779B1 - 2**32
_CHUNK = {"cpu": 2**17}  # elements: what stays in a core's cache
_CHUNK_DEVICE = 2**24
_AS_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def token_keys(
    seed: int, step: int, first_row: int, lengths: Sequence[int], device: torch.device | None = None
) -> Tensor:
    """[tokens] int64: a key per token of a segment whose rows have ``lengths``; on the host unless told otherwise.

    ``first_row``: ordinal of its first row within the whole optimizer step. Made by numpy: it is done for each segment of
    each microbatch, and ten operators of torch take longer than the arithmetic.
    """
    start = _signed(hashlib.sha256(f"{seed}/{step}".encode()).digest())
    rows = np.arange(first_row, first_row + len(lengths), dtype=np.int64)
    row_keys = _mix(rows * _GOLDEN + start)
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    keys = torch.from_numpy(_mix(np.repeat(row_keys, lengths) + positions * _GOLDEN))
    return keys if device is None else keys.to(device)


@dataclass(frozen=True)
class DropoutMask:
    """Which elements of one segment's input to one module are kept.

    Holds counters only; the keys made from them are computed when they are first asked for, so kernels that mix the
    counters themselves cost nothing here.
    """

    token_keys: Tensor  # [tokens] int64, from ``token_keys``: the same for all modules
    module_key: int  # int64
    features: int
    probability: float  # of zeroing an element; exact to 2**-31

    @cached_property
    def row_keys(self) -> Tensor:
        """[tokens] int32, odd."""
        return _odd(_mix(self.token_keys ^ self.module_key))

    @property
    def feature_keys(self) -> Tensor:
        """[features] int32, odd."""
        return feature_keys(self.features, self.token_keys.device)

    @cached_property
    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """``token_keys`` and ``feature_keys`` of a mask on the CPU, as compiled loops take them."""
        return self.token_keys.numpy(), self.feature_keys.numpy()

    @property
    def threshold(self) -> int:
        """Of an element's 31 bits, signed: below it the element is kept. int32, as are sums and differences with it."""
        return round((1.0 - self.probability) * 2**31) - 2**30

    @property
    def rescale(self) -> float:
        return 1.0 / (1.0 - self.probability)

    def of_rows(self, rows: slice) -> DropoutMask:
        """The mask of some of the segment's tokens."""
        return DropoutMask(self.token_keys[rows], self.module_key, self.features, self.probability)

    def apply(self, x: Tensor) -> Tensor:
        """``x`` [tokens, features] where kept, 0 elsewhere; a chunk at a time."""
        mask = DropoutMask(self.token_keys.to(x.device), self.module_key, self.features, self.probability)
        out = torch.empty_like(x)
        for rows in mask.chunks():
            out[rows] = keep(x[rows], mask.bits(rows))
        return out

    def chunks(self) -> Iterator[slice]:
        """Rows to work on at a time."""
        tokens, features = len(self.token_keys), self.features
        rows = max(16, _CHUNK.get(self.token_keys.device.type, _CHUNK_DEVICE) // features)
        for start in range(0, tokens, rows):
            yield slice(start, min(start + rows, tokens))

    def bits(self, rows: slice) -> Tensor:
        """[rows, features] int32: all ones where an element is kept, zero elsewhere."""
        bits = self.row_keys[rows, None] * self.feature_keys
        bits ^= bits >> 15
        bits *= MULTIPLIER
        # Half the range, so that the difference to the threshold cannot overflow; its sign is the answer.
        bits >>= 1
        bits -= self.threshold
        bits >>= 31
        return bits


def keep(x: Tensor, bits: Tensor) -> Tensor:
    """``x`` where ``bits`` are ones, 0 elsewhere; as integers, so it costs one operation."""
    integer = _AS_INTEGER[x.element_size()]
    return (x.view(integer) & bits.to(integer)).view(x.dtype)


def dropout_mask(keys: Tensor, module: str, features: int, probability: float) -> DropoutMask:
    """``keys`` [tokens] from ``token_keys``; ``module``: path of the module in the whole model."""
    return DropoutMask(keys, _module_key(module), features, probability)


@cache
def _module_key(module: str) -> int:
    return _signed(hashlib.sha256(module.encode()).digest())


@lru_cache(maxsize=64)
def feature_keys(features: int, device: torch.device) -> Tensor:
    """[features] int32, odd; the same for all modules and tasks."""
    return _odd(_mix(torch.arange(1, features + 1, device=device) * _GOLDEN))


def _mix(x: Integers) -> Integers:
    """splitmix64's finalizer, but with arithmetic shifts, on int64; products wrap around."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


def _odd(x: Tensor) -> Tensor:
    """The upper half of int64 as odd int32."""
    return (x >> 32).to(torch.int32) | 1


def _signed(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little", signed=True)
