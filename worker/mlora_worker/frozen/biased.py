"""A frozen matrix whose products get a bias: the head of models that have one. Whoever multiplies with the head knows of no
bias, and its gradient is that of the matrix alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlora_worker.frozen.weight import FrozenWeight, Multiplier


class BiasedWeight(FrozenWeight):
    def __init__(self, weight: FrozenWeight, bias: Tensor) -> None:
        """``bias`` [out]."""
        super().__init__()
        self.shape, self.dtype, self.library = weight.shape, weight.dtype, weight.library
        self.weight = weight
        self.register_buffer("bias", bias)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Of the matrix."""
        return self.weight.dense(dtype)

    def multiplier(self, dtype: torch.dtype) -> Multiplier:
        return _Biased(self.weight.multiplier(dtype), self.get_buffer("bias").to(dtype))


@dataclass(frozen=True, slots=True)
class _Biased:
    matrix: Multiplier
    bias: Tensor

    @property
    def joins_rows(self) -> bool:
        return self.matrix.joins_rows

    def times(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return self.matrix.times(x, self.bias if bias is None else self.bias + bias, out)

    def back(self, grad: Tensor, onto: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return self.matrix.back(grad, onto, out)
