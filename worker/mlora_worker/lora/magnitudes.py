"""DoRA: the rows of a weight and its product together keep a length that is learnt by itself.

With one number m for each output, a module computes ``m / |W + s B A| (W x + s B A x) + bias``, where the lengths of the
rows count as constants in the backward (section 4.3 of the paper, and PEFT). So it is what the plain products give, times
one factor for each output: whatever multiplies and adds them, on any device, stays as it is. The factors change only with
the parameters, once a step::

    |W + s B A|^2 = |W|^2 + 2 s (A W^T)^T . B + s^2 (B A A^T) . B        row by row

so W + s B A is never made, and a frozen weight of any kind is asked for one product of ``rank`` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlora_worker.frozen.weight import FrozenWeight
from mlora_worker.runtime.precision import product_dtype

_SHORTEST = 1e-30  # squared: a row of zeros has no direction, and a factor must stay a number


@dataclass(frozen=True, slots=True)
class Magnitude:
    """Of one module. All are [out] in float32."""

    weight: FrozenWeight
    a: Tensor  # [rank, in], in the base's type
    b: Tensor  # [out, rank], in the base's type
    scale: float
    value: Tensor  # m: a view of the adapter's parameters
    gradient: Tensor  # added to
    base: Tensor  # squared lengths of the rows of W
    length: Tensor  # of the rows of W + s B A
    factor: Tensor  # m / length

    @staticmethod
    def of(
        weight: FrozenWeight, a: Tensor, b: Tensor, scale: float, value: Tensor, gradient: Tensor
    ) -> Magnitude:
        dense = weight.dense(weight.dtype)
        base = torch.linalg.vector_norm(dense, dim=1, dtype=torch.float32).square_().to(value.device)
        return Magnitude(
            weight, a, b, scale, value, gradient, base, torch.empty_like(base), torch.empty_like(base)
        )

    def start(self) -> None:
        """As long as the rows of the base are, so that the adapter begins as the base does."""
        self.value.copy_(self.base.sqrt())

    def refresh(self) -> None:
        """A, B or m have changed."""
        wide = product_dtype(self.a.dtype, self.a.device)
        along = self.weight.multiplier(wide).times(self.a.to(wide)).float().T  # [out, rank]
        a, b = self.a.float(), self.b.float()
        mixed = along.mul_(2 * self.scale).addmm_(b, a @ a.T, alpha=self.scale**2)
        torch.sum(mixed.mul_(b), dim=1, out=self.length)
        self.length.add_(self.base).clamp_(min=_SHORTEST).sqrt_()
        torch.div(self.value, self.length, out=self.factor)

    @property
    def bytes(self) -> int:
        """Of what is derived; the values belong to the adapter."""
        return self.base.nbytes + self.length.nbytes + self.factor.nbytes


@dataclass(frozen=True, slots=True)
class GroupMagnitudes:
    """Of the modules of one input group that a task adapts alike."""

    group: int
    members: tuple[int, ...]  # positions in the group
    each: tuple[Magnitude, ...]


@dataclass(frozen=True, slots=True)
class SegmentMagnitudes:
    """One task's part of a microbatch on one input group."""

    rows: slice
    own: GroupMagnitudes
    weight: float  # of this segment's loss

    def scale(self, outputs: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Multiply ``outputs`` (per module of the group [tokens, out]) on the segment's rows, in place; the bias stays as
        it is. Returns what backward needs: for each member its rows as they were, without the bias.
        """
        kept = []
        for position, magnitude in zip(self.own.members, self.own.each, strict=True):
            output, bias = outputs[position][self.rows], biases[position]
            wide = product_dtype(output.dtype, output.device)
            plain = output.to(wide, copy=True)
            factor = magnitude.factor.to(wide)
            if bias is None:
                output.copy_(plain * factor)
            else:
                plain.sub_(bias)
                output.copy_(torch.addcmul(bias.to(wide), plain, factor))
            kept.append(plain)
        return tuple(kept)

    def unscale(self, grads: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Add to the gradients of the magnitudes, and make of ``grads``, which nobody else holds, those of the outputs
        before they were multiplied."""
        for position, magnitude, plain in zip(self.own.members, self.own.each, kept, strict=True):
            grad = grads[position][self.rows]
            learnt = (grad * plain).sum(dim=0, dtype=torch.float32)
            magnitude.gradient.add_(learnt.div_(magnitude.length), alpha=self.weight)
            grad.mul_(magnitude.factor.to(grad.dtype))


def scaled_members(segments: Sequence[SegmentMagnitudes]) -> frozenset[int]:
    """Positions in the group of the modules that any of ``segments`` multiplies."""
    return frozenset(position for segment in segments for position in segment.own.members)
