"""8-bit floats with a scale for each block of rows and columns, as checkpoints are published: ``W = w8 * scale``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mlora_worker.frozen.quantised import QuantisedWeight, row_slices, uncounted


class BlockFp8Weight(QuantisedWeight):
    def __init__(self, numbers: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> None:
        """``numbers`` [out, in] float8_e4m3fn, ``scales`` float32, one for each block of [rows, columns]."""
        outputs, inputs = numbers.shape
        super().__init__((outputs, inputs), dtype)
        self._block = block
        self.register_buffer("numbers", numbers)
        self.register_buffer("scales", scales)

    def unpacked(self) -> Tensor:
        numbers, scales = self.get_buffer("numbers"), self.get_buffer("scales")
        height, width = self._block
        dense = uncounted(self.shape, self.dtype, numbers.device)
        for rows in row_slices(self.shape, numbers.device, height):
            factors = scales[rows.start // height : math.ceil(rows.stop / height)]
            factors = factors.repeat_interleave(width, 1)[:, : self.shape[1]]
            factors = factors.repeat_interleave(height, 0)[: rows.stop - rows.start]
            dense[rows] = numbers[rows].float().mul_(factors)
        return dense


def scales_of(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks there are each way."""
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])


def block_fp8_bytes(outputs: int, inputs: int, block: tuple[int, int]) -> int:
    return outputs * inputs + 4 * math.prod(scales_of((outputs, inputs), block))
