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
from torch.profiler import record_function

from mlora_worker.frozen.onednn import OneDnnWeight, by_onednn
from mlora_worker.frozen.plain import DenseMultiplier
from mlora_worker.frozen.weight import FrozenWeight, Multiplier
from mlora_worker.stream.footprint import UNPACKED_AT_ONCE

# Torch's profiler calls the making of a dense matrix so. What a microbatch takes is learned from what torch gives it, and
# how much of its peak dense matrices and their making are would depend on where the peak is: they are counted by
# themselves (``stream.footprint``), and whoever counts blocks passes over those that are taken under this name.
UNPACKING = "mlora: a frozen matrix becomes dense"
# Elements to work on at a time, which are float32 for a moment. On a GPU each part is launches of its own.
_AT_ONCE, _AT_ONCE_ON_GPU = UNPACKED_AT_ONCE, 2**26


class QuantisedWeight(FrozenWeight):
    """Holds packed bytes as buffers. ``dtype``: of the dense values. ``library``: torch unless it is set."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype

    @abstractmethod
    def unpacked(self) -> Tensor:
        """[out, in] in the stage's type: a new tensor."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Rounded to the stage's type first, also where products are taken in a wider one: as a plain base would be."""
        with record_function(UNPACKING):
            return self.unpacked().to(dtype)

    def multiplier(self, dtype: torch.dtype) -> Multiplier:
        dense = self.dense(dtype)
        return by_onednn(dense) if self.library == OneDnnWeight.library else DenseMultiplier(dense)


def at_once(device: torch.device) -> int:
    """How many elements to work on at a time."""
    return _AT_ONCE if device.type == "cpu" else _AT_ONCE_ON_GPU


def row_slices(shape: tuple[int, int], device: torch.device) -> Iterator[slice]:
    """Rows of a matrix to work on at a time."""
    rows, columns = shape
    height = max(1, at_once(device) // max(columns, 1))
    return (slice(first, min(first + height, rows)) for first in range(0, rows, height))
