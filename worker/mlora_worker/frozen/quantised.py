"""What quantised weights have in common: they become dense for a pass, in the type that the stage computes in.

Forward and input gradient multiply with the very same dense values, so a gradient is exact for the base that is there: the
quantised one. What a kernel would round beside the weight (activations to 8 bits) differs from row to row, and would make a
row's result depend on how it was packed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from mlora_worker.frozen.onednn import OneDnnWeight, by_onednn
from mlora_worker.frozen.plain import DenseMultiplier
from mlora_worker.frozen.weight import FrozenWeight, Multiplier

# Elements that are float32 for a moment. On a GPU each part is launches of its own.
_AT_ONCE, _AT_ONCE_ON_GPU = 2**16, 2**26


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
        dense = self.unpacked()
        return dense if dtype == self.dtype else uncounted(dense.shape, dtype, dense.device).copy_(dense)

    def multiplier(self, dtype: torch.dtype) -> Multiplier:
        dense = self.dense(dtype)
        return by_onednn(dense) if self.library == OneDnnWeight.library else DenseMultiplier(dense)


def uncounted(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """For a dense matrix. On a CPU its memory is not torch's: what a microbatch takes is learned from what torch gives, and
    how much of its peak dense matrices are would depend on where the peak is. They are counted by themselves.
    """
    if device.type != "cpu":
        return torch.empty(*shape, dtype=dtype, device=device)
    raw = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(*shape)


def at_once(device: torch.device) -> int:
    """How many elements to work on at a time."""
    return _AT_ONCE if device.type == "cpu" else _AT_ONCE_ON_GPU


def row_slices(shape: tuple[int, int], device: torch.device, step: int = 1) -> Iterator[slice]:
    """Rows of a matrix to work on at a time, each a multiple of ``step`` from the start."""
    rows, columns = shape
    height = max(step, at_once(device) // max(columns, 1) // step * step)
    return (slice(first, min(first + height, rows)) for first in range(0, rows, height))
