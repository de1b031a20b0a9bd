"""The routed experts of a layer: many small feed-forwards, of which each token takes a few.

Each expert multiplies the tokens that chose it, whosever they are. No expert has a limit of tokens, so who else chose it
decides nothing; but how many rows a product has decides in which order some libraries add up. So a product's rows are cut
where one task's end and the next one's begin, as everywhere else, unless the library joins rows exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mlora_worker.frozen.weight import FrozenWeight, Multiplier
from mlora_worker.runtime.precision import product_dtype
from mlora_worker.stream.footprint import MOST_EXPERT_ROWS

Gated = Callable[..., Tensor]  # of gate and up, or of what there is in their place, element by element


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


class Additions(Protocol):
    """What a task's adapter adds to an expert's products with the task's rows. All of it in place; low-rank activations
    that a method returns are given back to the backward, and None says that nothing was added."""

    @property
    def needs_input(self) -> bool:
        """Whether the backward needs what went into gate and up."""
        ...

    def to_gate_up(self, expert: int, x: Tensor, gate: Tensor, up: Tensor) -> Tensor | None: ...
    def to_down(self, expert: int, x: Tensor, y: Tensor) -> Tensor | None: ...
    def back_of_down(
        self, expert: int, x: Tensor, low: Tensor | None, grad: Tensor, factor: Tensor, grad_x: Tensor
    ) -> None:
        """``grad``: of what the expert gives, before the router's weights ``factor`` [rows, 1] multiply it; so is
        ``grad_x``."""
        ...

    def back_of_gate_up(
        self, expert: int, x: Tensor, low: Tensor | None, gate: Tensor, up: Tensor, grad_x: Tensor | None
    ) -> None:
        """``gate``, ``up``: gradients."""
        ...


class FrozenExperts(nn.Module):
    """``down(gated(gate(x), up(x)))`` of each expert, weighted by the router; all matrices [out, in]. Without ``up``:
    ``down(gated(gate(x)))``, and no adapters.

    It computes what transformers' module of stacked experts does, and takes its place. ``additions``: asked in each forward
    for what adapters add to the rows of each segment; where none has any, nothing.
    """

    def __init__(
        self,
        gate: Sequence[FrozenWeight],
        up: Sequence[FrozenWeight],
        down: Sequence[FrozenWeight],
        gated: Gated,
        segments: SegmentTokens,
        biases: Biases | None = None,
        in_turns: bool = False,
    ) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.ModuleList(gate), nn.ModuleList(up), nn.ModuleList(down)
        self.gated, self.segments = gated, segments
        self.inner = ("gate", "up") if up else ("gate",)  # the matrices before ``gated``
        self.additions: Callable[[], Sequence[Additions | None]] = tuple
        for name, bias in biases._asdict().items() if biases else ():
            self.register_buffer(f"{name}_bias", bias)
        # Rows of gate and of up in the parameter that transformers has for both.
        both = 2 * gate[0].shape[0]
        self.halves = (
            (slice(0, None, 2), slice(1, None, 2)) if in_turns else (slice(both // 2), slice(both // 2, both))
        )
        self.rows_at_once = 0  # the most of one expert in the last forward
        # Adapters learn, also where ``hidden`` needs no gradient.
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [tokens, size], chosen [tokens, k] of each token the experts, weights [tokens, k] -> [tokens, size]."""
        additions = self.additions()
        y: Tensor = _Routed.apply(
            hidden, weights, chosen, self, additions, self._anchor if any(additions) else None
        )
        return y

    def bias(self, name: str, expert: int) -> Tensor | None:
        stack = getattr(self, f"{name}_bias", None)
        return None if stack is None else stack[expert]


class _Chosen(NamedTuple):
    """An expert that some tokens chose."""

    expert: int
    cuts: tuple[slice, ...]  # of their rows, by segment
    added: tuple[tuple[Additions, slice], ...]  # to rows of one segment


def _choices(
    chosen: Tensor, experts: int, segments: Sequence[int], additions: Sequence[Additions | None]
) -> Iterator[tuple[_Chosen, Tensor, Tensor]]:
    """Each with its tokens [rows], ascending, and the place that the expert has among each token's. One look at the
    device's values for all of them. ``additions``: of each segment, or none."""
    (tokens, k), on_cpu = chosen.shape, chosen.device.type == "cpu"
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
        for parts in _at_once(own) if on_cpu else [list(enumerate(own))]:
            parts = [(segment, count) for segment, count in parts if count]
            rows = sum(count for _, count in parts)
            if not rows:
                continue
            pairs = order[start : start + rows]
            start += rows
            ends = tuple(accumulate(count for _, count in parts))
            places = [slice(end - count, end) for end, (_, count) in zip(ends, parts, strict=True)]
            added = [
                (one, place)
                for (segment, _), place in zip(parts, places, strict=True)
                if additions and (one := additions[segment]) is not None
            ]
            cuts = tuple(places) if on_cpu else (slice(rows),)
            yield _Chosen(expert, cuts, tuple(added)), pairs // k, pairs % k


def _at_once(counts: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Rows of one expert, by segment, that are worked on at a time: what a pass takes beside what is kept must not turn on
    how many tokens choose the same expert. A segment is cut by its own rows alone."""
    parts: list[tuple[int, int]] = []
    for segment, count in enumerate(counts):
        pieces = -(-count // MOST_EXPERT_ROWS)
        for piece in range(pieces):
            rows = count * (piece + 1) // pieces - count * piece // pieces
            if parts and sum(own for _, own in parts) + rows > MOST_EXPERT_ROWS:
                yield parts
                parts = []
            parts.append((segment, rows))
    yield parts


class _Routed(torch.autograd.Function):
    """Keeps gate and up of each choice, and the low-rank activations of what is added. What an expert gives is not kept:
    its product with a gradient, which is the gradient of the router's weight, is that of what went into ``down`` with the
    gradient there.

    A token's experts are added up in their own order, in float32 at least, so the sum is the same in any company.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weights: Tensor,
        chosen: Tensor,
        experts: FrozenExperts,
        additions: Sequence[Additions | None],
        anchor: Tensor | None,
    ) -> Tensor:
        del anchor
        dtype, wide = hidden.dtype, product_dtype(hidden.dtype, hidden.device)
        total = torch.zeros(hidden.shape, dtype=_summed(dtype), device=hidden.device)
        segments = experts.segments.cut(len(hidden), hidden.device)
        if any(additions):
            segments = experts.segments.counts or (len(hidden),)
        choices, kept, most = [], list[Tensor | None](), 0
        for one, tokens, places in _choices(chosen, len(experts.gate), segments, additions):
            x = hidden[tokens].to(wide)
            parts = [_times(experts, name, one, x) for name in experts.inner]
            lows = [own.to_gate_up(one.expert, x[at], *(part[at] for part in parts)) for own, at in one.added]
            parts = [part.to(dtype) for part in parts]
            inner = experts.gated(*parts).to(wide)
            y = _times(experts, "down", one, inner)
            lows += [own.to_down(one.expert, inner[at], y[at]) for own, at in one.added]
            y = y.to(dtype)
            factor = weights[tokens, places, None].to(total.dtype)
            total.index_add_(0, tokens, y.to(total.dtype).mul_(factor))
            choices.append(one)
            most = max(most, len(tokens))
            kept += [tokens, places, *parts, *lows]
        experts.rows_at_once = most
        needed = any(one is not None and one.needs_input for one in additions)
        ctx.save_for_backward(hidden if needed else None, weights, *kept)
        ctx.choices, ctx.experts, ctx.wide = choices, experts, wide
        return total.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (hidden, weights, *all_kept) = grads, ctx.saved_tensors
        kept = iter(all_kept)
        experts, wide, dtype = ctx.experts, ctx.wide, grad.dtype
        onward_too, router_too, *_ = ctx.needs_input_grad
        grad_x = torch.zeros(grad.shape, dtype=_summed(dtype), device=grad.device)
        grad_weights = torch.zeros(weights.shape, dtype=_summed(dtype), device=grad.device)
        for one in ctx.choices:
            tokens, places, *parts = islice(kept, 2 + len(experts.inner))
            wide_lows, lows = ([*islice(kept, len(one.added))] for _ in range(2))
            with torch.enable_grad():
                parts = [part.detach().requires_grad_() for part in parts]
                inner = experts.gated(*parts)
            upstream, factor = grad[tokens], weights[tokens, places, None]
            back = _back(experts, ("down",), one, [upstream.to(wide)])
            for (own, at), low in zip(one.added, lows, strict=True):
                was = inner.detach()[at].to(wide)
                own.back_of_down(one.expert, was, low, upstream[at].to(wide), factor[at].to(wide), back[at])
            back, factor = back.to(grad_x.dtype), factor.to(grad_x.dtype)
            at_router = (back * inner.detach().to(back.dtype)).sum(dim=1)
            bias = experts.bias("down", one.expert)
            if bias is not None:
                # No product with a vector: how one adds up depends on how many rows there are.
                at_router += (upstream.to(back.dtype) * bias.to(back.dtype)).sum(dim=1)
            grad_weights[tokens, places] = at_router
            inside = [each.to(wide) for each in torch.autograd.grad(inner, parts, (back * factor).to(dtype))]
            onward = _back(experts, experts.inner, one, inside) if onward_too else None
            for (own, at), low in zip(one.added, wide_lows, strict=True):
                if low is None:
                    continue
                x = hidden[tokens[at]].to(wide)
                into = None if onward is None else onward[at]
                own.back_of_gate_up(one.expert, x, low, *(each[at] for each in inside), into)
            if onward is not None:
                grad_x.index_add_(0, tokens, onward.to(grad_x.dtype))
        return (
            grad_x.to(dtype) if onward_too else None,
            grad_weights.to(weights.dtype) if router_too else None,
            *(None,) * 4,
        )


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
        """``hidden`` [tokens, size] or [1, tokens, size], whichever the model gives it; ``others``: what is the same for
        all tokens."""
        counts = self.segments.cut(hidden.shape[-2], hidden.device)
        # A single one is cut out, too: gradients of what reads its rows twice are added up in the same order.
        parts = [self.router(part, *others) for part in torch.split(hidden, list(counts), dim=-2)]
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))
