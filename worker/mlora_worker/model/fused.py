"""Norms, gated activations and rotary embeddings in one pass each, on a CPU: in float32, and in bfloat16 with float32
inside.

transformers writes them as chains of element-wise operations, each of which goes through memory, and keeps what lies
between for the backward. The modules here take the place of those that they equal: ``fuse`` tries each candidate on
random numbers and leaves alone what differs, so no list of models is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mlora_worker.frozen.linear import FrozenLinear
from mlora_worker.frozen.weight import FrozenWeight
from mlora_worker.model.fused_kernels import array, kernels
from mlora_worker.model.rotation import Made, rotate_by
from mlora_worker.model.steady import parts_of
from mlora_worker.runtime.numba_loops import AVAILABLE, spread

# Relative, of the largest element. In bfloat16 it is two roundings: another activation differs by far more.
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
_TRIED_ROWS = 5
_LINEAR = (nn.Linear, FrozenLinear)


def fuse(layers: nn.Module) -> int:
    """Replace norms, gated feed-forward modules and rotary embeddings below ``layers``; returns how many. Weights are
    shared, not copied."""
    if not AVAILABLE:
        return 0
    replaced = 0
    for parent in list(layers.modules()):
        for name, child in list(parent.named_children()):
            fused = _fused_norm(child) or _fused_mlp(child)
            if fused is not None:
                setattr(parent, name, fused)
                replaced += 1
        replaced += rotate_by(parent, _Rotary.apply, _difference, _TOLERANCE)
    return replaced


class FusedRMSNorm(nn.Module):
    """[..., size] -> ``weight * x / sqrt(mean(x^2) + eps)``."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _RMSNorm.apply(x, self.weight, self.epsilon)
        return y


class FusedGatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(_SiluTimes.apply(self.gate_proj(x), self.up_proj(x)))
        return y


def _fused_norm(module: nn.Module) -> FusedRMSNorm | None:
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or not isinstance(epsilon, float) or not _suits(weight):
        return None
    if weight.ndim != 1:  # a norm for each head
        return None
    if len(signature(module.forward).parameters) != 1:  # it may have a gate, too
        return None
    fused = FusedRMSNorm(weight, epsilon)
    return fused if _equal(module, fused, len(weight), weight.dtype) else None


def _fused_mlp(module: nn.Module) -> FusedGatedMLP | None:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    gate, up, down = parts
    if not isinstance(gate, _LINEAR) or not isinstance(up, _LINEAR) or not isinstance(down, _LINEAR):
        return None
    if not all(_suits(part.weight) for part in (gate, up, down)):
        return None
    fused = FusedGatedMLP(gate, up, down)
    return fused if _equal(module, fused, gate.in_features, gate.weight.dtype) else None


def _suits(weight: Tensor | FrozenWeight) -> bool:
    if isinstance(weight, Tensor) and weight.requires_grad:
        return False
    return weight.dtype in _TOLERANCE and weight.device.type == "cpu"


@torch.no_grad()
def _equal(module: nn.Module, fused: nn.Module, size: int, dtype: torch.dtype) -> bool:
    x = torch.randn(_TRIED_ROWS, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    return _difference(fused, module, lambda: (x,)) <= _TOLERANCE[dtype]


@torch.no_grad()
def _difference(one: Callable[..., Any], other: Callable[..., Any], make: Made) -> float:
    """The largest, in parts of the largest element; infinite where shapes or arguments differ."""
    try:
        results = [one(*make()), other(*make())]
        found, wanted = (result if isinstance(result, tuple) else (result,) for result in results)
        return max(
            float((a.float() - b.float()).abs().max() / b.float().abs().max())
            if a.shape == b.shape
            else torch.inf
            for a, b in zip(found, wanted, strict=True)
        )
    except (RuntimeError, TypeError, ValueError, IndexError):
        return torch.inf


class _RMSNorm(torch.autograd.Function):
    """Saves x and a number per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        y, rescale = torch.empty_like(flat), torch.empty(len(flat))
        source, scale, target, rescales = map(array, (flat, weight, y, rescale))
        norm = kernels().norm if flat.dtype == torch.float32 else kernels().half_norm

        def some(rows: slice) -> None:
            norm(source[rows], scale, np.float32(epsilon), target[rows], rescales[rows])

        spread(some, *flat.shape)
        ctx.save_for_backward(flat, weight, rescale)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, rescale = ctx.saved_tensors
        grad = grads[0].reshape(flat.shape).contiguous()
        grad_x = torch.empty_like(flat)
        source, scale, rescales, upstream, target = map(array, (flat, weight, rescale, grad, grad_x))
        back = kernels().norm_backward if flat.dtype == torch.float32 else kernels().half_norm_backward

        def some(rows: slice) -> None:
            back(source[rows], scale, rescales[rows], upstream[rows], target[rows])

        spread(some, *flat.shape)
        return grad_x.view(grads[0].shape), None, None


class _Rotary(torch.autograd.Function):
    """Keeps the cosines and sines, which all layers share."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(q, cos, sin, backward=False), _rotated(k, cos, sin, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *(_rotated(grad, cos, sin, backward=True) for grad in grads), None, None


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> Tensor:
    """[1, heads, tokens, size], which lies token by token afterwards, as the products want it."""
    by_token = not heads.is_contiguous()
    flat = (heads[0].transpose(0, 1) if by_token else heads[0]).contiguous()
    y = heads.new_empty(heads.shape[2], heads.shape[1], heads.shape[3])
    source, cosines, sines, target = map(array, (flat, cos[0].contiguous(), sin[0].contiguous(), y))
    rotate = kernels().rotate if heads.dtype == torch.float32 else kernels().half_rotate

    def some(rows: slice) -> None:
        own = source[rows] if by_token else source[:, rows]
        rotate(own, cosines[rows], sines[rows], target[rows], by_token, backward)

    spread(some, len(y), y[0].numel() if len(y) else 0)
    return y.transpose(0, 1)[None]


class _SiluTimes(torch.autograd.Function):
    """``silu(gate) * up``, of which only gate and up are kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        size = gate.shape[-1]
        # Whether there are gradients is a thread's own matter.
        gates, ups = (t.detach().reshape(-1, size) for t in (gate, up))
        y = torch.empty_like(gates, memory_format=torch.contiguous_format)

        def some(rows: slice) -> None:
            for part in parts_of(rows, size):
                torch.ops.aten.silu.out(gates[part], out=y[part]).mul_(ups[part])

        spread(some, *gates.shape)
        return y.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (t.contiguous() for t in ctx.saved_tensors)
        grad = grads[0].contiguous()
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        size = gate.shape[-1]
        flat = gate.detach().reshape(-1, size)
        gates, ups, upstream, for_gate, for_up = (
            array(t.reshape(-1, size)) for t in (gate, up, grad, grad_gate, grad_up)
        )
        half = gate.dtype == torch.bfloat16
        back = kernels().half_silu_times_backward if half else kernels().silu_times_backward

        def some(rows: slice) -> None:
            for part in parts_of(rows, size):
                # silu's and its derivative's only transcendental part, by torch's vectorised functions.
                sigmoid = array(torch.sigmoid(flat[part].float()))
                back(gates[part], ups[part], sigmoid, upstream[part], for_gate[part], for_up[part])

        spread(some, *gates.shape)
        return grad_gate, grad_up
