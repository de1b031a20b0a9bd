"""Element by element, with bits that do not turn on how many elements there are, on a CPU.

torch computes most elements of a tensor with the processor's vectors and the last ones of each thread's part without; of
a sigmoid, of GELU, and of powers that are no whole numbers, both differ in the last bit. Which elements are the last ones
depends on how many there are, and so on a task's neighbours. So such a function is applied to parts here that one thread
computes, and that are whole vectors, or single rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
from transformers.models.afmoe.modeling_afmoe import AfmoeAttention
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from mlora_worker.model.recurrent.plain import (
    Lfm2MLP,
    Lfm2MoeMLP,
    Qwen3_5Attention,
    Qwen3_5MoeAttention,
    Qwen3NextAttention,
)
from mlora_worker.model.rotation import calling
from mlora_worker.runtime.numba_loops import spread

_ONE_THREADS = 2**14  # elements that torch gives to one thread at least; of GELU 20,000, of others more
_VECTORS = 64  # elements of a turn of its loops, at most
_SILU = (nn.SiLU, SiLUActivation)
_WITH_GATES = (AfmoeAttention, Qwen3_5Attention, Qwen3_5MoeAttention, Qwen3NextAttention)
_WITH_SILU = (Lfm2MLP, Lfm2MoeMLP)  # called, where others have a module
_Op = Callable[..., object]
_GELU = (torch.ops.aten.gelu.out, torch.ops.aten.gelu_backward.grad_input)


def parts_of(rows: slice, size: int) -> Iterator[slice]:
    """``rows`` of ``size`` elements, so many at a time that each element is computed in the same way."""
    at_once = max(1, _ONE_THREADS // size) if size % _VECTORS == 0 else 1
    return (slice(first, min(first + at_once, rows.stop)) for first in range(rows.start, rows.stop, at_once))


def in_parts(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``function`` of ``tensors`` [rows, size], element by element; differentiable."""
    rows, size = tensors[0].shape
    if tensors[0].device.type != "cpu":
        return function(*tensors)
    return torch.cat([function(*(one[part] for one in tensors)) for part in parts_of(slice(0, rows), size)])


def steady_silu(x: Tensor) -> Tensor:
    return _steadily(x, torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input, by_output=False)


class SteadySilu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return steady_silu(x)


class SteadyGelu(nn.Module):
    """``approximate``: as torch has it, none or tanh."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate
        self._ops = [partial(op, approximate=approximate) for op in _GELU]

    def forward(self, x: Tensor) -> Tensor:
        return _steadily(x, *self._ops, by_output=False)


def steady_sigmoid(x: Tensor) -> Tensor:
    return _steadily(
        x, torch.ops.aten.sigmoid.out, torch.ops.aten.sigmoid_backward.grad_input, by_output=True
    )


def _steadily(x: Tensor, function: _Op, derivative: _Op, *, by_output: bool) -> Tensor:
    y: Tensor = _Steadily.apply(x, function, derivative, by_output)
    return y


class _Steadily(torch.autograd.Function):
    """``derivative`` takes the gradient and the input, or the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: _Op, derivative: _Op, by_output: bool) -> Tensor:
        y = _each(x, lambda part, own: function(part, out=own), x)
        ctx.save_for_backward(y if by_output else x)
        ctx.derivative = derivative
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (kept,) = ctx.saved_tensors

        def back(grad: Tensor, part: Tensor, own: Tensor) -> None:
            ctx.derivative(grad, part, grad_input=own)

        return _each(kept, back, grads[0], kept), None, None, None


def _each(like: Tensor, write: Callable[..., object], *tensors: Tensor) -> Tensor:
    # Whether there are gradients is a thread's own matter.
    flat = [one.detach().reshape(-1, one.shape[-1]) for one in tensors]
    y = torch.empty(flat[0].shape, dtype=like.dtype, device=like.device)

    def some(rows: slice) -> None:
        for part in parts_of(rows, y.shape[-1]):
            write(*(one[part] for one in flat), y[part])

    if y.device.type != "cpu":
        write(*flat, y)
    elif y.shape[-1] > _ONE_THREADS:
        some(slice(0, len(y)))  # torch gives a row to all its threads
    else:
        spread(some, *y.shape)
    return y.view(like.shape)


class SteadyGemma4Norm(Gemma4RMSNorm):  # type: ignore[misc]  # transformers' classes have no types
    """A root in the place of a power, whose gradient is a power, too."""

    def _norm(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + self.eps)


class SteadyGemma3nNorm(Gemma3nRMSNorm):  # type: ignore[misc]
    """The same."""

    _norm = SteadyGemma4Norm._norm


_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    Gemma3nRMSNorm: SteadyGemma3nNorm,
    Gemma4RMSNorm: SteadyGemma4Norm,
}


class _Torch:
    """torch, with another sigmoid: what attention with a gate calls."""

    sigmoid = staticmethod(steady_sigmoid)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Functional:
    """torch.nn.functional, with another SiLU."""

    silu = staticmethod(steady_silu)

    def __getattr__(self, name: str) -> Any:
        return getattr(nn.functional, name)


def make_steady(model: PreTrainedModel) -> None:
    """Put these in the place of transformers' below ``model``."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            approximate = _gelu(child)
            if type(child) in _SILU:
                setattr(module, name, SteadySilu())
            elif approximate is not None:
                setattr(module, name, SteadyGelu(approximate))
        if type(module) in _NORMS:
            module.__class__ = _NORMS[type(module)]
        if type(module) in _WITH_GATES:
            forward = inspect.unwrap(type(module).forward)
            module.__class__ = calling(type(module), forward, "torch", _Torch())
        elif type(module) in _WITH_SILU:
            module.__class__ = calling(type(module), type(module).forward, "F", _Functional())


def _gelu(module: nn.Module) -> str | None:
    """Which of torch's GELUs it is. transformers' classes have others, too, of operations that differ nowhere."""
    if type(module) is nn.GELU:
        return module.approximate
    if type(module) is GELUActivation and module.act is nn.functional.gelu:
        return "none"
    return "tanh" if type(module) is GELUTanh and isinstance(module.act, partial) else None
