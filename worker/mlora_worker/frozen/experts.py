"""The routed experts of a layer: many small feed-forwards, of which each token takes a few.

Each expert multiplies the tokens that chose it, whosever they are. No expert has a limit of tokens, so who else chose it
decides nothing; but how many rows a product has decides in which order some libraries add up. So a product's rows are cut
where one task's end and the next one's begin, as everywhere else, unless the library joins rows exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mlora_worker.frozen.weight import FrozenWeight, Multiplier
from mlora_worker.runtime.precision import product_dtype

Gated = Callable[[Tensor, Tensor], Tensor]  # of gate and up, element by element


@dataclass(slots=True)
class SegmentTokens:
    """Tokens of each segment of the microbatch that runs now, in their order; empty: all are one segment's. Set before
    each layer, also when it is computed again. Backward uses what forward saw."""

    counts: tuple[int, ...] = ()

    def cut(self, tokens: int, device: torch.device) -> tuple[int, ...]:
        """What to cut ``tokens`` into. On a GPU nothing is: its kernels take any number of rows in the same way."""
        return self.counts if self.counts and device.type == "cpu" else (tokens,)


class Biases(NamedTuple):
    gate: Tensor  # [experts, width]
    up: Tensor  # [experts, width]
    down: Tensor  # [experts, hidden]


class FrozenExperts(nn.Module):
    """``down(gated(gate(x), up(x)))`` of each expert, weighted by the router; all matrices [out, in].

    It computes what transformers' module of stacked experts does, and takes its place.
    """

    def __init__(
        self,
        gate: Sequence[FrozenWeight],
        up: Sequence[FrozenWeight],
        down: Sequence[FrozenWeight],
        gated: Gated,
        segments: SegmentTokens,
        biases: Biases | None = None,
    ) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.ModuleList(gate), nn.ModuleList(up), nn.ModuleList(down)
        self.gated, self.segments = gated, segments
        for name, bias in biases._asdict().items() if biases else ():
            self.register_buffer(f"{name}_bias", bias)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [tokens, size], chosen [tokens, k] of each token the experts, weights [tokens, k] -> [tokens, size]."""
        y: Tensor = _Routed.apply(hidden, weights, chosen, self)
        return y

    def bias(self, name: str, expert: int) -> Tensor | None:
        stack = getattr(self, f"{name}_bias", None)
        return None if stack is None else stack[expert]


class _Chosen(NamedTuple):
    """An expert that some tokens chose."""

    expert: int
    cuts: tuple[slice, ...]  # of their rows, by segment


def _choices(
    chosen: Tensor, experts: int, segments: Sequence[int]
) -> Iterator[tuple[_Chosen, Tensor, Tensor]]:
    """Each with its tokens [rows], ascending, and the place that the expert has among each token's. One look at the
    device's values for all of them."""
    tokens, k = chosen.shape
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    owner = torch.repeat_interleave(
        torch.arange(len(segments), device=flat.device),
        torch.tensor(segments, device=flat.device) * k,
        output_size=tokens * k,
    )
    counts = torch.bincount(flat * len(segments) + owner, minlength=experts * len(segments))
    start = 0
    for expert, own in enumerate(counts.view(experts, len(segments)).tolist()):
        rows = sum(own)
        if not rows:
            continue
        pairs = order[start : start + rows]
        start += rows
        ends = tuple(accumulate(own))
        cuts = tuple(slice(end - count, end) for end, count in zip(ends, own, strict=True) if count)
        yield _Chosen(expert, cuts), pairs // k, pairs % k


class _Routed(torch.autograd.Function):
    """Keeps gate and up of each choice. What an expert gives is not kept: its product with a gradient, which is the
    gradient of the router's weight, is that of what went into ``down`` with the gradient there.

    A token's experts are added up in their own order, in float32 at least, so the sum is the same in any company.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, chosen: Tensor, experts: FrozenExperts) -> Tensor:
        dtype, wide = hidden.dtype, product_dtype(hidden.dtype, hidden.device)
        total = torch.zeros(hidden.shape, dtype=_summed(dtype), device=hidden.device)
        segments = experts.segments.cut(len(hidden), hidden.device)
        choices, kept = [], list[Tensor]()
        for one, tokens, places in _choices(chosen, len(experts.gate), segments):
            x = hidden[tokens].to(wide)
            gate, up = (_times(experts, name, one, x).to(dtype) for name in ("gate", "up"))
            y = _times(experts, "down", one, experts.gated(gate, up).to(wide)).to(dtype)
            factor = weights[tokens, places, None].to(total.dtype)
            total.index_add_(0, tokens, y.to(total.dtype).mul_(factor))
            choices.append(one)
            kept += [tokens, places, gate, up]
        ctx.save_for_backward(weights, *kept)
        ctx.choices, ctx.experts, ctx.wide = choices, experts, wide
        return total.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (weights, *kept) = grads, ctx.saved_tensors
        experts, wide, dtype = ctx.experts, ctx.wide, grad.dtype
        grad_x = torch.zeros(grad.shape, dtype=_summed(dtype), device=grad.device)
        grad_weights = torch.zeros(weights.shape, dtype=_summed(dtype), device=grad.device)
        for one in ctx.choices:
            tokens, places, *parts = (kept.pop(0) for _ in range(4))
            with torch.enable_grad():
                gate, up = (part.detach().requires_grad_() for part in parts)
                inner = experts.gated(gate, up)
            upstream = grad[tokens]
            back = _back(experts, ("down",), one, [upstream.to(wide)]).to(grad_x.dtype)
            at_router = (back * inner.detach().to(back.dtype)).sum(dim=1)
            bias = experts.bias("down", one.expert)
            if bias is not None:
                at_router += upstream.to(back.dtype) @ bias.to(back.dtype)
            grad_weights[tokens, places] = at_router
            factor = weights[tokens, places, None].to(back.dtype)
            inside = torch.autograd.grad(inner, (gate, up), (back * factor).to(dtype))
            onward = _back(experts, ("gate", "up"), one, [each.to(wide) for each in inside])
            grad_x.index_add_(0, tokens, onward.to(grad_x.dtype))
        return grad_x.to(dtype), grad_weights.to(weights.dtype), None, None


def _summed(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _times(experts: FrozenExperts, name: str, one: _Chosen, x: Tensor) -> Tensor:
    """[rows, out]."""
    weight: FrozenWeight = getattr(experts, name)[one.expert]
    multiplier, bias = weight.multiplier(x.dtype), experts.bias(name, one.expert)
    bias = None if bias is None else bias.to(x.dtype)
    out = x.new_empty(len(x), weight.shape[0])
    for rows in _together(multiplier, one):
        multiplier.times(x[rows], bias, out=out[rows])
    return out


def _back(experts: FrozenExperts, names: Sequence[str], one: _Chosen, grads: Sequence[Tensor]) -> Tensor:
    """[rows, in]: added up over the matrices ``names``."""
    total: Tensor | None = None
    for name, grad in zip(names, grads, strict=True):
        weight: FrozenWeight = getattr(experts, name)[one.expert]
        multiplier = weight.multiplier(grad.dtype)
        out = grad.new_empty(len(grad), weight.shape[1]) if total is None else total
        for rows in _together(multiplier, one):
            multiplier.back(grad[rows], onto=None if total is None else total[rows], out=out[rows])
        total = out
    assert total is not None
    return total


def _together(multiplier: Multiplier, one: _Chosen) -> tuple[slice, ...]:
    return (slice(None),) if multiplier.joins_rows else one.cuts


class CutRouter(nn.Module):
    """The model's own router on each segment's rows by themselves: a choice between two experts that are as good as each
    other must not turn on how many rows a neighbour has."""

    def __init__(self, router: nn.Module, segments: SegmentTokens) -> None:
        super().__init__()
        self.router, self.segments = router, segments

    def forward(self, hidden: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        """``others``: what is the same for all tokens."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        counts = self.segments.cut(len(flat), flat.device)
        if len(counts) == 1:
            return tuple(self.router(flat, *others))
        parts = [self.router(part, *others) for part in torch.split(flat, list(counts))]
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))
