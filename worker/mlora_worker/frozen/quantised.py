"""What quantised weights have in common: they become dense for a pass, in the type that the stage computes in.

Forward and input gradient multiply with the very same dense values, so a gradient is exact for the base that is there: the
quantised one. What a kernel would round beside the weight (activations to 8 bits) differs from row to row, and would make a
row's result depend on how it was packed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from mlora_worker.frozen.plain import DenseMultiplier
from mlora_worker.frozen.weight import FrozenWeight, Multiplier

_AT_ONCE = 2**22  # elements that are float32 for a moment


class QuantisedWeight(FrozenWeight):
    """Holds packed bytes as buffers. ``dtype``: of the dense values."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype

    @abstractmethod
    def unpacked(self) -> Tensor:
        """[out, in] in the stage's type: a new tensor."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Rounded to the stage's type first, also where products are taken in a wider one: as a plain base would be."""
        return self.unpacked().to(dtype)

    def multiplier(self, dtype: torch.dtype) -> Multiplier:
        return DenseMultiplier(self.dense(dtype))


def row_slices(shape: tuple[int, int], step: int = 1) -> Iterator[slice]:
    """Rows of a matrix to work on at a time, each a multiple of ``step`` from the start."""
    rows, columns = shape
    height = max(step, _AT_ONCE // max(columns, 1) // step * step)
    return (slice(first, min(first + height, rows)) for first in range(0, rows, height))
