"""Another way to rotate heads in the place of the function that transformers' attention calls.

The function is looked for by its arguments and held against the other way on random numbers, so no list of models is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from mlora_worker.frozen.weight import FrozenWeight

Like = Tensor | FrozenWeight
# q [1, heads, tokens, size], k [1, key heads, tokens, size], cos and sin [1, tokens, rotated] -> q and k, rotated
Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Made = Callable[[], tuple[Tensor, ...]]  # arguments to try
Differ = Callable[[Callable[..., Any], Callable[..., Any], Made], float]

_ROTATED = ("q", "k", "cos", "sin")


def rotate_by(
    module: nn.Module, rotation: Rotation, differ: Differ, tolerances: Mapping[torch.dtype, float]
) -> bool:
    """Give the module a class whose ``forward`` calls ``rotation`` instead of a function that does the same.

    ``differ``: how far two functions are apart on the same arguments; ``tolerances``: how far they may be, by type."""
    size = getattr(module, "head_dim", None)
    weight = _some_weight(module)
    if not isinstance(size, int) or size % 2 or weight is None or weight.dtype not in tolerances:
        return False
    if isinstance(weight, Tensor) and weight.requires_grad:
        return False
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType):
        return False
    for name in forward.__code__.co_names:
        plain = forward.__globals__.get(name)
        if not isinstance(plain, FunctionType) or tuple(inspect.signature(plain).parameters)[:4] != _ROTATED:
            continue
        # A function may know heads of which only the first part is rotated, or may not.
        whole, part = (
            differ(_Rotate(plain, rotated, rotation), plain, partial(_heads, weight, size, rotated))
            for rotated in (size, size // 4 * 2)
        )
        if whole <= tolerances[weight.dtype]:
            own = _Rotate(plain, None if part <= tolerances[weight.dtype] else size, rotation)
            module.__class__ = calling(type(module), forward, name, own)
            return True
    return False


class _Rotate:
    """``width``: numbers of a head that may be rotated; None: any. Other calls are the plain function's."""

    def __init__(
        self, plain: Callable[..., tuple[Tensor, Tensor]], width: int | None, rotation: Rotation
    ) -> None:
        self._plain, self._width, self._rotation = plain, width, rotation

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        rotated, size = cos.shape[-1], q.shape[-1]
        fits = rotated == self._width if self._width is not None else rotated <= size and rotated % 2 == 0
        packed = q.ndim == 4 and cos.shape == (1, q.shape[2], rotated) and len(q) == 1
        alike = q.dtype == k.dtype == cos.dtype == sin.dtype
        if others or options or not fits or not packed or not alike:
            return self._plain(q, k, cos, sin, *others, **options)
        return self._rotation(q, k, cos, sin)


def calling(kind: type, forward: Any, name: str, own: object) -> type:
    """``kind`` with a ``forward`` in which ``name`` is ``own``: transformers' module stays as it is for others."""
    copy = FunctionType(
        forward.__code__, {**forward.__globals__, name: own}, forward.__name__, forward.__defaults__, forward.__closure__
    )  # fmt: skip
    copy.__kwdefaults__ = forward.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": copy, "__module__": kind.__module__})


def _some_weight(module: nn.Module) -> Like | None:
    """For its type: a quantised one has no parameters."""
    frozen = (one for one in module.modules() if isinstance(one, FrozenWeight))
    return next(frozen, None) or next(module.parameters(), None)


def _heads(like: Like, size: int, rotated: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 3, 5, size), (1, 2, 5, size), (1, 5, rotated), (1, 5, rotated))
    return tuple(torch.randn(shape, generator=generator).to(like.device, like.dtype) for shape in shapes)
