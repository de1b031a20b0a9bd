"""The low-rank products on a CPU: few large products of the matrix library for each segment.

The function calls this block by block (``rows_per_block``), so that a block's input and output are still in the cache
from the base's product. Launches cost nothing here beside the products; what costs is memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlora_worker.lora.cpu_kernels import masked, masked_adding
from mlora_worker.lora.groups import GroupSegment


class CpuProducts:
    """``Products`` by torch's own operations; runs on other devices, too, where it is only slow.

    ``rows_per_block``: None where launches cost more than a cache gives.
    """

    def __init__(self, rows_per_block: int | None = 384) -> None:
        self.rows_per_block = rows_per_block

    def prepare(self, groups: Sequence[Sequence[GroupSegment]]) -> Sequence[Sequence[GroupSegment]]:
        return groups

    def forward(
        self, x: Tensor, outputs: Sequence[Tensor], segments: Sequence[GroupSegment]
    ) -> tuple[Tensor, ...]:
        lows = []
        for segment in segments:
            low = _dropped(x[segment.rows], segment) @ segment.a.to(x.dtype).T
            for position, b, columns in _members(segment):
                outputs[position][segment.rows].addmm_(low[:, columns], b.to(x.dtype).T, alpha=segment.factor)
            lows.append(low)
        return tuple(lows)

    def backward(
        self,
        x: Tensor,
        grad_outputs: Sequence[Tensor],
        grad_x: Tensor | None,
        segments: Sequence[GroupSegment],
        saved: tuple[Tensor, ...],
    ) -> None:
        for segment, low in zip(segments, saved, strict=True):
            strength = segment.factor * segment.weight
            grad_low = torch.empty_like(low)
            for (position, b, columns), grad_b in zip(_members(segment), segment.grad_b, strict=True):
                grad_y = grad_outputs[position][segment.rows]
                torch.mm(grad_y, b.to(x.dtype), out=grad_low[:, columns])
                _add_b(grad_b, grad_y, low[:, columns], strength)
            own, own_grad = x[segment.rows], None if grad_x is None else grad_x[segment.rows]
            dropped = _dropped(own, segment) if own_grad is None else _back(own, grad_low, own_grad, segment)
            accumulate(segment.grad_a, grad_low.T, dropped, strength)


def _back(x: Tensor, grad_low: Tensor, grad_x: Tensor, segment: GroupSegment) -> Tensor:
    """Add to ``grad_x``; returns ``x`` as the products saw it."""
    a = segment.a.to(x.dtype)
    if segment.mask is None:
        grad_x.addmm_(grad_low, a, alpha=segment.factor)
        return x
    if x.device.type == "cpu":
        return masked_adding(x, segment.mask, grad_x, grad_low @ a, segment.factor)
    grad_x.add_(segment.mask.apply(grad_low @ a), alpha=segment.factor)
    return segment.mask.apply(x)


def _members(segment: GroupSegment) -> list[tuple[int, Tensor, slice]]:
    """Position in the group, B, and columns of the low-rank activations, of each targeted module."""
    rank = segment.rank
    return [
        (position, b, slice(j * rank, (j + 1) * rank))
        for j, (position, b) in enumerate(zip(segment.members, segment.b, strict=True))
    ]


def _dropped(x: Tensor, segment: GroupSegment) -> Tensor:
    if segment.mask is None:
        return x
    return masked(x, segment.mask) if x.device.type == "cpu" else segment.mask.apply(x)


def _add_b(buffer: Tensor, grad_y: Tensor, low: Tensor, strength: float) -> None:
    """``buffer += strength * grad_y^T low``. In float32 on a CPU it is turned round: with the few rows on the left it takes
    less than two thirds of the time."""
    if buffer.dtype == low.dtype == torch.float32 and low.device.type == "cpu":
        buffer.add_(torch.mm(low.T.contiguous(), grad_y).T, alpha=strength)
    else:
        accumulate(buffer, grad_y.T, low, strength)


def accumulate(buffer: Tensor, left: Tensor, right: Tensor, strength: float) -> None:
    """``buffer += strength * left @ right``; sums of half-precision products are kept in float32 where they
    can be.
    """
    if buffer.dtype == left.dtype:
        buffer.addmm_(left, right, alpha=strength)
    elif left.is_cuda:
        buffer.add_(torch.mm(left, right, out_dtype=buffer.dtype), alpha=strength)
    else:
        buffer.add_(torch.mm(left, right), alpha=strength)
