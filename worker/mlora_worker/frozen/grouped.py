"""All experts of a layer in one product, where a device has it: torch's ``grouped_mm``.

The loop of ``experts`` starts some ten kernels for each expert, and waits for the router's choices, since it needs to know
how many rows each expert has. Here the choices stay on the device: rows are put in the order of their experts, and a
product takes the ends of their parts. It is taken on CUDA from capability 9.0 on, in bfloat16, for plain weights, if it
computes what the loop does.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mlora_worker.frozen.experts import FrozenExperts
from mlora_worker.frozen.plain import PlainWeight

log = logging.getLogger(__name__)

_CAPABILITY = (9, 0)
_ALIGNED = 8  # numbers of 16 bits: rows begin at multiples of 16 bytes
_TRIED_TOKENS = 32
_TOLERANCE = 2**-6  # of the largest element: two roundings of bfloat16


class Order(NamedTuple):
    """The choices of all tokens, those of an expert together."""

    pairs: Tensor  # [tokens * k]: where each was
    tokens: Tensor  # [tokens * k]: whose it was
    experts: Tensor  # [tokens * k], ascending
    ends: Tensor  # [experts] int32: where the rows of each end


def order_of(chosen: Tensor, experts: int) -> Order:
    """chosen [tokens, k]. Nothing of it is looked at from the host."""
    flat = chosen.reshape(-1)
    pairs = torch.argsort(flat, stable=True)
    ordered = flat[pairs]
    every = torch.arange(experts, device=flat.device, dtype=flat.dtype)
    ends = torch.searchsorted(ordered, every, right=True).to(torch.int32)
    return Order(pairs, pairs // chosen.shape[1], ordered, ends)


class GroupedExperts(FrozenExperts):
    """The matrices of the experts are views of three stacks."""

    def __init__(self, experts: FrozenExperts) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(experts.__dict__)
        self.stacks = {name: _stacked(getattr(self, name)) for name in ("gate", "up", "down")}

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        # Products that adapters add to those of experts know the loop alone.
        if any(self.additions()):
            return super().forward(hidden, chosen, weights)
        self.rows_at_once = 0  # all at once: tokens say how many
        y: Tensor = _Grouped.apply(hidden, weights, chosen, self)
        return y

    def times(self, name: str, x: Tensor, order: Order) -> Tensor:
        """[rows, in] -> [rows, out]."""
        y: Tensor = functional.grouped_mm(x, self.stacks[name].transpose(1, 2), offs=order.ends)
        bias: Tensor | None = getattr(self, f"{name}_bias", None)
        return y if bias is None else y + bias.to(y.dtype)[order.experts]

    def back(self, name: str, grad: Tensor, order: Order) -> Tensor:
        """[rows, out] -> [rows, in]."""
        back: Tensor = functional.grouped_mm(grad, self.stacks[name], offs=order.ends)
        return back


class _Grouped(torch.autograd.Function):
    """As ``experts._Routed``: gate and up are kept, and a token's experts are added up in float32 at least, in the order in
    which it chose them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, chosen: Tensor, experts: GroupedExperts) -> Tensor:
        order = order_of(chosen, len(experts.gate))
        x = hidden[order.tokens]
        gate, up = (experts.times(name, x, order) for name in ("gate", "up"))
        y = experts.times("down", experts.gated(gate, up), order)
        ctx.save_for_backward(weights, gate, up, *order)
        ctx.experts = experts
        weighted = y.float() * weights.reshape(-1, 1)[order.pairs].float()
        return _of_tokens(weighted, order, chosen.shape).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (weights, *parts) = grads, ctx.saved_tensors
        experts: GroupedExperts = ctx.experts
        order = Order(*parts[2:])
        with torch.enable_grad():
            gate, up = (part.detach().requires_grad_() for part in parts[:2])
            inner = experts.gated(gate, up)
        upstream = grad[order.tokens]
        back = experts.back("down", upstream, order).float()
        at_router = (back * inner.detach().float()).sum(dim=1)
        bias: Tensor | None = getattr(experts, "down_bias", None)
        if bias is not None:
            at_router += (upstream.float() * bias.float()[order.experts]).sum(dim=1)
        grad_weights = torch.empty_like(at_router).index_copy_(0, order.pairs, at_router)
        factor = weights.reshape(-1, 1)[order.pairs].float()
        inside = torch.autograd.grad(inner, (gate, up), (back * factor).to(grad.dtype))
        grad_x = None
        if ctx.needs_input_grad[0]:
            onward = experts.back("gate", inside[0], order).float()
            onward += experts.back("up", inside[1], order).float()
            grad_x = _of_tokens(onward, order, weights.shape).to(grad.dtype)
        return grad_x, grad_weights.view_as(weights).to(weights.dtype), None, None


def _of_tokens(rows: Tensor, order: Order, chosen: torch.Size) -> Tensor:
    """[tokens * k, size] in the order of the experts -> [tokens, size]: of each token, the sum of its rows."""
    placed = torch.empty_like(rows).index_copy_(0, order.pairs, rows)
    return placed.view(*chosen, -1).sum(dim=1)


def _stacked(weights: nn.ModuleList) -> Tensor:
    """[experts, out, in]; the weights become views of it."""
    stack = torch.stack([weight.get_parameter("matrix").detach() for weight in weights])
    for weight, own in zip(weights, stack, strict=True):
        weight.matrix = nn.Parameter(own, requires_grad=False)
    return stack


def has_grouped_products(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
    """Whether a device has them for matrices of these sizes, by what torch says of it."""
    return (
        hasattr(functional, "grouped_mm")
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= _CAPABILITY
        and dtype == torch.bfloat16
        and all(size % _ALIGNED == 0 for size in sizes)
    )


def grouped_where_it_can(experts: FrozenExperts) -> FrozenExperts:
    """``experts``, with one product for all of them where the device has it and it computes the same."""
    weights = (*experts.gate, *experts.up, *experts.down)
    first = experts.gate[0]
    if not all(type(weight) is PlainWeight for weight in weights) or not isinstance(first, PlainWeight):
        return experts
    if not experts.up:
        return experts
    if not has_grouped_products(first.device, first.dtype, first.shape):
        return experts
    return grouped_if_equal(experts, first.dtype, first.device)


def grouped_if_equal(experts: FrozenExperts, dtype: torch.dtype, device: torch.device) -> FrozenExperts:
    """What ``experts`` become if both compute the same of random tokens, else they themselves."""
    made = GroupedExperts(experts)
    generator = torch.Generator().manual_seed(0)
    count, first = len(experts.gate), experts.gate[0]
    assert isinstance(first, PlainWeight)
    size = first.shape[1]
    k = min(2, count)
    hidden, upstream = (
        torch.randn(_TRIED_TOKENS, size, generator=generator).to(device, dtype) for _ in range(2)
    )
    scores = torch.rand(_TRIED_TOKENS, count, generator=generator)
    weights, chosen = (one.to(device) for one in scores.topk(k, dim=1))
    weights = weights.to(dtype)
    try:
        found = _with_gradients(made, hidden, chosen, weights, upstream)
    except RuntimeError as error:
        log.warning("experts are multiplied one by one, because torch's grouped product failed: %s", error)
        return experts
    wanted = _with_gradients(experts, hidden, chosen, weights, upstream)
    for one, other in zip(found, wanted, strict=True):
        difference = (one.float() - other.float()).abs().max() / other.float().abs().max()
        if not float(difference) <= _TOLERANCE:
            log.warning(
                "experts are multiplied one by one: torch's grouped product differs by %.1e", difference
            )
            return experts
    return made


def _with_gradients(
    experts: FrozenExperts, hidden: Tensor, chosen: Tensor, weights: Tensor, upstream: Tensor
) -> tuple[Tensor, ...]:
    """Output, and gradients of the input and of the router's weights."""
    leaves = [one.clone().requires_grad_() for one in (hidden, weights)]
    with torch.enable_grad():
        y = experts(leaves[0], chosen, leaves[1])
    return y.detach(), *torch.autograd.grad(y, leaves, upstream)
