"""An ordinary tensor as a weight, and products with one: those of torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mlora_worker.frozen.weight import FrozenWeight, Multiplier

_FEWEST_OUTPUTS = 8


@dataclass(frozen=True, slots=True)
class DenseMultiplier:
    """``matrix`` [out, in] of the type of the products. Also for weights that become dense for a pass."""

    matrix: Tensor

    @property
    def joins_rows(self) -> bool:
        return False

    def times(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if len(self.matrix) == 1:
            y = _one_output(x, self.matrix, bias)
            return y if out is None else out.copy_(y)
        if bias is None:
            return torch.mm(x, self.matrix.T, out=out)
        return torch.addmm(bias, x, self.matrix.T, out=out)

    def back(self, grad: Tensor, onto: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if onto is None:
            return torch.mm(grad, self.matrix, out=out)
        return torch.addmm(onto, grad, self.matrix, out=onto if out is None else out)


class PlainWeight(FrozenWeight):
    """The tensor that the file has. It is shared, not copied: a tied head is the embedding's."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        outputs, inputs = matrix.shape
        self.shape, self.dtype = (outputs, inputs), matrix.dtype
        self.matrix = nn.Parameter(matrix.detach(), requires_grad=False)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.matrix.detach().to(dtype)

    def multiplier(self, dtype: torch.dtype) -> Multiplier:
        return DenseMultiplier(self.dense(dtype))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, self.matrix, bias) if len(self.matrix) > 1 else _one_output(x, self.matrix, bias)


def _one_output(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """The product with a single row, among copies of it: alone it would be one with a vector, which libraries add up in an
    order that depends on how many tokens there are."""
    y = linear(x, matrix.expand(_FEWEST_OUTPUTS, -1))[..., :1]
    return y if bias is None else y + bias
