"""4-bit floats in blocks of 32 with a power of two as scale (MXFP4), as gpt-oss is published: ``W = w4 * 2^(s - 127)``."""

from __future__ import annotations

import torch
from torch import Tensor

from mlora_worker.frozen.quantised import QuantisedWeight, row_slices

MXFP4_BLOCK = 32
_BIAS = 127
# By their four bits: a sign, two of the exponent, one of the fraction.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4Weight(QuantisedWeight):
    def __init__(self, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        """``blocks`` [out, in / 32, 16] uint8, two numbers in each, the first in the lower half; ``scales`` [out, in / 32]
        uint8."""
        outputs, count, _ = blocks.shape
        super().__init__((outputs, count * MXFP4_BLOCK), dtype)
        self.register_buffer("blocks", blocks)
        self.register_buffer("scales", scales)

    def unpacked(self) -> Tensor:
        blocks, scales = self.get_buffer("blocks"), self.get_buffer("scales")
        values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=blocks.device)
        dense = torch.empty(self.shape, dtype=self.dtype, device=blocks.device)
        for rows in row_slices(self.shape, blocks.device):
            packed = blocks[rows]
            pairs = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
            exponents = scales[rows].int().sub_(_BIAS)[..., None]
            dense[rows] = torch.ldexp(values[pairs.int()], exponents).flatten(-2)
        return dense


def mxfp4_bytes(outputs: int, inputs: int) -> int:
    return outputs * inputs // 2 + outputs * inputs // MXFP4_BLOCK
