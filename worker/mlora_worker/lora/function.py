"""The low-rank products of many tasks on one frozen linear module, as one autograd node.

A *product* is one segment's part: on its rows of the packed input, ``y += alpha / r * (dropout(x) A^T) B^T``.
Products are added in place on the rows of the base's output, and their input gradients on the rows of the
base's input gradient, so no split or concatenate node exists and ``x`` is saved once. Gradients of A and B go
straight into the adapter's float32 buffers, multiplied by the segment's weight (1 / supervised tokens of its
step): the gradients that travel between layers and stages are those of plain sums, which stay in the range of
half precision.

``reference`` computes the same in plain autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from mlora_worker.lora.dropout import DropoutMask, keep


@dataclass(frozen=True, slots=True)
class Product:
    """One segment's low-rank product on one module."""

    rows: slice  # of the packed tokens
    a: Tensor  # [rank, in], in the base's type
    b: Tensor  # [out, rank], in the base's type
    grad_a: Tensor  # [rank, in] float32, added to
    grad_b: Tensor  # [out, rank] float32, added to
    scale: float  # alpha / rank
    weight: float  # of this segment's loss
    mask: DropoutMask | None  # None: no dropout

    @property
    def factor(self) -> float:
        """What the product is multiplied by, dropout's rescaling included."""
        return self.scale if self.mask is None else self.scale * self.mask.rescale


class LinearWithProducts(torch.autograd.Function):
    """x [..., in] -> [..., out]; ``anchor`` requires a gradient, so that the node exists when ``x`` needs
    none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: tuple[Product, ...],
    ) -> Tensor:
        del anchor
        flat = x.reshape(-1, x.shape[-1])
        y = linear(flat, weight, bias)
        lows = []
        for product in products:
            low = _down(flat[product.rows], product)
            y[product.rows].addmm_(low, product.b.T, alpha=product.factor)
            lows.append(low)
        ctx.save_for_backward(x, weight, *lows)
        ctx.products = products
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *lows = ctx.saved_tensors
        flat = x.reshape(-1, x.shape[-1])
        grad_y = grad_outputs[0].reshape(-1, weight.shape[0])
        grad_x = grad_y @ weight if ctx.needs_input_grad[0] else None
        for product, low in zip(ctx.products, lows, strict=True):
            own = grad_y[product.rows]
            strength = product.factor * product.weight
            _accumulate(product.grad_b, own.T, low, strength)
            grad_low = own @ product.b
            own_grad_x = None if grad_x is None else grad_x[product.rows]
            _up(flat[product.rows], grad_low, product, strength, own_grad_x)
        return None if grad_x is None else grad_x.view(x.shape), None, None, None, None


def _down(x: Tensor, product: Product) -> Tensor:
    """[rows, rank]: dropout(x) A^T without dropout's rescaling."""
    if product.mask is None:
        return x @ product.a.T
    low = x.new_empty(x.shape[0], product.a.shape[0])
    for rows in product.mask.chunks():
        torch.mm(keep(x[rows], product.mask.bits(rows)), product.a.T, out=low[rows])
    return low


def _up(x: Tensor, grad_low: Tensor, product: Product, strength: float, grad_x: Tensor | None) -> None:
    """Adds A's gradient to its buffer, and the input's to ``grad_x`` in place."""
    if product.mask is None:
        _accumulate(product.grad_a, grad_low.T, x, strength)
        if grad_x is not None:
            grad_x.addmm_(grad_low, product.a, alpha=product.factor)
        return
    for rows in product.mask.chunks():
        bits = product.mask.bits(rows)
        _accumulate(product.grad_a, grad_low[rows].T, keep(x[rows], bits), strength)
        if grad_x is not None:
            grad_x[rows].add_(keep(grad_low[rows] @ product.a, bits), alpha=product.factor)


def _accumulate(buffer: Tensor, left: Tensor, right: Tensor, strength: float) -> None:
    """``buffer += strength * left @ right``; sums of half-precision products are kept in float32 where they
    can be.
    """
    if buffer.dtype == left.dtype:
        buffer.addmm_(left, right, alpha=strength)
    elif left.is_cuda:
        buffer.add_(torch.mm(left, right, out_dtype=buffer.dtype), alpha=strength)
    else:
        buffer.add_(torch.mm(left, right), alpha=strength)
