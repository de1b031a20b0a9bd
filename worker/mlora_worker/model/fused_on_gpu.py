"""Norms, gated activations and rotary embeddings by one kernel each, on a GPU.

The modules and the function here take the place of those that they equal, as ``fused`` has it on a CPU: each candidate is
tried on random numbers, and what differs is left alone, so no list of models is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from mlora_worker.frozen.linear import FrozenLinear
from mlora_worker.frozen.weight import FrozenWeight
from mlora_worker.model.elementwise import MOST_SIZE, Gated, RMSNorm, Rotary
from mlora_worker.model.rotation import Differ, Like, Made, rotate_by
from mlora_worker.model.triton_elementwise import GELU, GELU_TANH, SILU
from mlora_worker.runtime.kernel_compiler import Launch, launch

Some = TypeVar("Some", bound=nn.Module)

_ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    SILU.value: silu,
    GELU.value: gelu,
    GELU_TANH.value: lambda x: gelu(x, approximate="tanh"),
}
_SCALES = (1e-3, 3e-2, 1.0, 3.0, 10.0)  # of the rows that are tried: small ones show an epsilon
# Of the largest element of a row. Half precision differs by its last bit where sums come in another order.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
_SAME = 2e-6  # activations in float32


@torch.no_grad()
def difference(one: Callable[..., Any], other: Callable[..., Any], make: Made) -> float:
    """The largest over rows of the last dimension, each in parts of its largest element; infinite where one fails."""
    try:
        found, wanted = _listed(one(*make())), _listed(other(*make()))
        return max(_row_difference(*pair) for pair in zip(found, wanted, strict=True))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return torch.inf


def fuse_on_gpu(layers: nn.Module, launch: Launch = launch, differ: Differ = difference) -> int:
    """Replace norms, gated feed-forward modules and rotary embeddings below ``layers``; returns how many. Weights are
    shared, not copied. ``differ``: how far a candidate is from what it would replace; for those who start no kernels.
    """

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        both: tuple[Tensor, Tensor] = Rotary.apply(q, k, cos, sin, launch)
        return both

    replaced = 0
    for parent in list(layers.modules()):
        for name, child in list(parent.named_children()):
            fused = _norm(child, launch, differ) or _gated(child, launch, differ)
            if fused is not None:
                setattr(parent, name, fused)
                replaced += 1
        replaced += rotate_by(parent, rotate, differ, _TOLERANCES)
    return replaced


class TritonRMSNorm(nn.Module):
    """``offset``: added to the weight. ``rounds``: to the base's type before the weight, too."""

    def __init__(
        self, weight: nn.Parameter, epsilon: float, offset: float, rounds: bool, launch: Launch
    ) -> None:
        super().__init__()
        self.weight, self.epsilon, self.offset, self.rounds = weight, epsilon, offset, rounds
        self._launch = launch

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = RMSNorm.apply(x, self.weight, self.epsilon, self.offset, self.rounds, self._launch)
        return y


class TritonGatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``; ``gate_up_proj``: both by one module, gate first."""

    gate_proj: nn.Module
    up_proj: nn.Module
    gate_up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, parts: dict[str, nn.Module], kind: int, launch: Launch) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.kind, self._launch = kind, launch
        self._together = "gate_up_proj" in parts

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (
            self.gate_up_proj(x).chunk(2, dim=-1) if self._together else (self.gate_proj(x), self.up_proj(x))
        )
        y: Tensor = self.down_proj(Gated.apply(gate, up, self.kind, self._launch))
        return y


def _norm(module: nn.Module, launch: Launch, differ: Differ) -> TritonRMSNorm | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(epsilon, float):
        return None
    if not _suits(weight) or len(weight) > MOST_SIZE or len(list(module.parameters())) != 1:
        return None
    if len(signature(module.forward).parameters) != 1:  # it may have a gate, too
        return None
    # Where the type is float32 nothing is rounded on the way: the first of two equals is taken.
    candidates = [
        TritonRMSNorm(weight, epsilon, offset, rounds, launch)
        for offset in (0.0, 1.0)
        for rounds in (True, False)
    ]
    return _nearest(candidates, module, lambda: _rows(weight, len(weight)), differ, weight.dtype)


def _gated(module: nn.Module, launch: Launch, differ: Differ) -> TritonGatedMLP | None:
    names = ("gate_up_proj",) if hasattr(module, "gate_up_proj") else ("gate_proj", "up_proj")
    parts = {name: getattr(module, name, None) for name in (*names, "down_proj")}
    linears = {name: part for name, part in parts.items() if isinstance(part, nn.Linear | FrozenLinear)}
    activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    suited = all(_suits(one.weight) for one in linears.values())
    if len(linears) < len(parts) or activation is None or not suited:
        return None
    first = linears[names[0]]
    # In float32, where two activations that are close differ by more than they are rounded by.
    some = torch.linspace(-8, 8, 257, device=first.weight.device)[None]
    kinds = [
        kind for kind, plain in _ACTIVATIONS.items() if differ(activation, plain, lambda: (some,)) <= _SAME
    ]
    candidates = [TritonGatedMLP(dict(linears), kind, launch) for kind in kinds]
    return _nearest(
        candidates, module, lambda: _rows(first.weight, first.in_features), differ, first.weight.dtype
    )


def _nearest(
    candidates: Iterable[Some], module: nn.Module, make: Made, differ: Differ, dtype: torch.dtype
) -> Some | None:
    judged = [(differ(one, module, make), one) for one in candidates]
    best = min(judged, key=lambda pair: pair[0], default=None)
    return best[1] if best is not None and best[0] <= _TOLERANCES[dtype] else None


def _suits(weight: Like) -> bool:
    if isinstance(weight, FrozenWeight):
        return weight.dtype in _TOLERANCES
    return weight.dtype in _TOLERANCES and not weight.requires_grad and weight.is_contiguous()


def _rows(like: Like, size: int) -> tuple[Tensor, ...]:
    drawn = torch.randn(len(_SCALES), size, generator=torch.Generator().manual_seed(0))
    return ((drawn * torch.tensor(_SCALES)[:, None])[None].to(like.device, like.dtype),)


def _row_difference(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return torch.inf
    apart = (found.double() - wanted.double()).abs().amax(-1) / wanted.double().abs().amax(-1)
    return float(apart.nan_to_num(torch.inf, torch.inf).max())


def _listed(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
