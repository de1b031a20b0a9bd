"""8 bits a weight, with a scale for each output: ``W[o, i] = q[o, i] * scale[o]``."""

from __future__ import annotations

import torch
from torch import Tensor

from mlora_worker.frozen.quantised import QuantisedWeight, row_slices

_LARGEST = 127


class Int8Weight(QuantisedWeight):
    def __init__(self, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        """``numbers`` [out, in] int8, ``scales`` [out] float32."""
        outputs, inputs = numbers.shape
        super().__init__((outputs, inputs), dtype)
        self.register_buffer("numbers", numbers)
        self.register_buffer("scales", scales)

    def unpacked(self) -> Tensor:
        numbers, scales = self.get_buffer("numbers"), self.get_buffer("scales")
        dense = torch.empty(self.shape, dtype=self.dtype, device=numbers.device)
        for rows in row_slices(self.shape, numbers.device):
            dense[rows] = numbers[rows].float().mul_(scales[rows, None])
        return dense


def int8(matrix: Tensor) -> Int8Weight:
    """Round ``matrix`` [out, in] to the nearest. The largest element of each row keeps its value."""
    numbers = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    scales = torch.empty(len(matrix), dtype=torch.float32, device=matrix.device)
    for rows in row_slices((matrix.shape[0], matrix.shape[1]), matrix.device):
        part = matrix[rows].float()
        scale = part.abs().amax(dim=1) / _LARGEST
        scale[scale == 0] = 1.0
        numbers[rows] = (part / scale[:, None]).round_().clamp_(-_LARGEST, _LARGEST)
        scales[rows] = scale
    return Int8Weight(numbers, scales, matrix.dtype)


def int8_bytes(outputs: int, inputs: int) -> int:
    return outputs * inputs + 4 * outputs
