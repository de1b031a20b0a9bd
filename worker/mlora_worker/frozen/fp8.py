"""8-bit floats with a scale for each block of rows and columns, as checkpoints are published: ``W = w8 * scale``. A block
may be a whole row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mlora_worker.frozen.quantised import QuantisedWeight, row_slices


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
        outputs, inputs = self.shape
        whole = inputs // width * width
        dense = torch.empty(self.shape, dtype=self.dtype, device=numbers.device)
        blocks = torch.arange(outputs, device=numbers.device) // height
        for rows in row_slices(self.shape, numbers.device):
            factors, part = scales[blocks[rows]], numbers[rows].float()
            part[:, :whole].view(len(part), whole // width, width).mul_(factors[:, : whole // width, None])
            part[:, whole:].mul_(factors[:, whole // width :])
            dense[rows] = part
        return dense


def scales_of(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks there are each way."""
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])


def block_fp8_bytes(outputs: int, inputs: int, block: tuple[int, int]) -> int:
    return outputs * inputs + 4 * math.prod(scales_of((outputs, inputs), block))
