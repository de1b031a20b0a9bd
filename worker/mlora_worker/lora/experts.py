"""The low-rank products of many tasks on routed experts: what each adds to its own rows of an expert.

Parameters of experts hold one matrix for each, so a task's adapter has an A and a B for each, of its rank. Gate and up are
one parameter: they share A and have halves of B. The loop over experts is the base's (``frozen/experts``), which calls here
with the rows of one task that chose an expert: no row of another is ever in a product. Gradients go straight into the
adapter's buffers, as those of linear modules do (``function``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlora_worker.frozen.experts import Additions, FrozenExperts
from mlora_worker.lora.cpu import accumulate
from mlora_worker.lora.linear import Bound
from mlora_worker.lora.stacked import StackedPair


@dataclass(frozen=True, slots=True)
class StackedPart:
    """A task's adapter on one parameter of a layer's experts."""

    values: StackedPair  # in the base's type
    gradient: StackedPair  # float32, added to
    scale: float  # alpha / rank, or what takes its place

    def of(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[rank, in] and [out, rank] of one expert."""
        a, b = self.values.of(expert)
        return a.to(dtype), b.to(dtype)


@dataclass(frozen=True, slots=True)
class ExpertsPart:
    """A task's adapter on the experts of one layer. ``gate`` and ``up``: rows of B that are those of each."""

    gate_up: StackedPart | None
    down: StackedPart | None
    gate: slice
    up: slice


@dataclass(frozen=True, slots=True)
class SegmentAdditions:
    """One task's, in one microbatch. ``weight``: of its segment's loss."""

    part: ExpertsPart
    weight: float

    @property
    def needs_input(self) -> bool:
        return self.part.gate_up is not None

    def to_gate_up(self, expert: int, x: Tensor, gate: Tensor, up: Tensor) -> Tensor | None:
        own = self.part.gate_up
        if own is None:
            return None
        a, b = own.of(expert, x.dtype)
        low = x @ a.T
        gate.addmm_(low, b[self.part.gate].T, alpha=own.scale)
        up.addmm_(low, b[self.part.up].T, alpha=own.scale)
        return low

    def to_down(self, expert: int, x: Tensor, y: Tensor) -> Tensor | None:
        own = self.part.down
        if own is None:
            return None
        a, b = own.of(expert, x.dtype)
        low = x @ a.T
        y.addmm_(low, b.T, alpha=own.scale)
        return low

    def back_of_down(
        self, expert: int, x: Tensor, low: Tensor | None, grad: Tensor, factor: Tensor, grad_x: Tensor
    ) -> None:
        own = self.part.down
        if own is None or low is None:
            return
        (a, b), (grad_a, grad_b) = own.of(expert, x.dtype), own.gradient.of(expert)
        grad_low, strength = grad @ b, own.scale * self.weight
        accumulate(grad_b, (grad * factor).T, low, strength)
        accumulate(grad_a, (grad_low * factor).T, x, strength)
        grad_x.addmm_(grad_low, a, alpha=own.scale)

    def back_of_gate_up(
        self, expert: int, x: Tensor, low: Tensor | None, gate: Tensor, up: Tensor, grad_x: Tensor | None
    ) -> None:
        own = self.part.gate_up
        if own is None or low is None:
            return
        (a, b), (grad_a, grad_b) = own.of(expert, x.dtype), own.gradient.of(expert)
        grad_low = (gate @ b[self.part.gate]).addmm_(up, b[self.part.up])
        strength = own.scale * self.weight
        accumulate(grad_b[self.part.gate], gate.T, low, strength)
        accumulate(grad_b[self.part.up], up.T, low, strength)
        accumulate(grad_a, grad_low.T, x, strength)
        if grad_x is not None:
            grad_x.addmm_(grad_low, a, alpha=own.scale)


def adapt_experts(experts: Mapping[str, FrozenExperts], bound: Bound) -> None:
    """Have each of ``experts``, by its path in the whole model, add what tasks bring to the microbatch that runs now."""
    for path, module in experts.items():
        module.additions = _Now(path, bound)


@dataclass(frozen=True, slots=True)
class _Now:
    path: str
    bound: Bound

    def __call__(self) -> Sequence[Additions | None]:
        return self.bound.experts.get(self.path, ())
