"""A frozen matrix of the base model, and products with it.

Whoever multiplies knows two products and no layout: rows times the matrix, for the forward, and gradients times the matrix,
for the input's gradient. A pass asks for a ``Multiplier`` once and uses it for all its blocks of rows, so a weight that
has to be made dense first is made so once a pass, and both products of a pass see the same values.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Multiplier(Protocol):
    """A matrix [out, in] that is ready for products in one type. What it is given and writes is of that type."""

    @property
    def joins_rows(self) -> bool:
        """Whether a row's result has the same bits whatever rows are beside it, so that rows of many tasks may be
        multiplied together. Else each task's are multiplied by themselves."""
        ...

    def times(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """``x W^T + bias``: [rows, in] -> [rows, out], written to ``out`` where there is one."""
        ...

    def back(self, grad: Tensor, onto: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """``grad W``, plus ``onto``, which is used up; [rows, out] -> [rows, in], written to ``out`` where there is one."""
        ...


class FrozenWeight(nn.Module):
    """[out, in]. A module, so that its tensors move and count with those of the layer that it is in.

    ``dense`` gives the values that all products are exact for: a gradient is that of the base which is there.
    """

    shape: tuple[int, int]
    dtype: torch.dtype  # of the dense values
    library = "torch"  # that multiplies with it

    @property
    def device(self) -> torch.device:
        held = next(iter((*self.parameters(), *self.buffers())), None)
        return torch.device("cpu") if held is None else held.device

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> Tensor:
        """The whole matrix as an ordinary tensor; not to be written to, since it may be the weight itself."""

    @abstractmethod
    def multiplier(self, dtype: torch.dtype) -> Multiplier:
        """For products in ``dtype``; valid for a pass, since it may hold a dense copy."""

    @property
    def resident_bytes(self) -> int:
        """That it takes as long as the stage lives."""
        return sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., in] -> [..., out], differentiable in ``x``: for rows to which nothing is added."""
        y: Tensor = _Product.apply(x, self, bias)
        return y


class _Product(torch.autograd.Function):
    """Keeps nothing: the input's gradient needs the weight alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FrozenWeight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        flat = x.reshape(-1, x.shape[-1])
        return weight.multiplier(x.dtype).times(flat, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0]
        flat = grad.reshape(-1, grad.shape[-1])
        back = ctx.weight.multiplier(grad.dtype).back(flat)
        return back.view(*grad.shape[:-1], back.shape[-1]), None, None
