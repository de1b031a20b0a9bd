"""What attention has to be told where transformers' layers do not say it: where packed rows begin, of layers that take any
argument and give their attention only those that they know; and windows, where transformers has them in masks alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from torch import nn

_ROWS: Final = "packed"  # the argument of layers and attention
_WINDOW: Final = "sliding_window"  # that of attention
_Words = dict[str, Any]


def hand_on(layers: Iterable[nn.Module], attention: str) -> None:
    """``attention``: its path in each of ``layers``."""
    for layer in layers:
        layer.register_forward_pre_hook(partial(_tell, attention), with_kwargs=True)
        layer.get_submodule(attention).register_forward_pre_hook(partial(_take, _ROWS), with_kwargs=True)


def tell_window(layers: Iterable[nn.Module], attention: str, window: int | None) -> None:
    """``attention``: as above."""
    for layer in layers:
        module = layer.get_submodule(attention)
        setattr(module, _WINDOW, window)
        module.register_forward_pre_hook(partial(_take, _WINDOW), with_kwargs=True)


def _tell(attention: str, layer: nn.Module, positions: tuple[Any, ...], words: _Words) -> None:
    del positions
    setattr(layer.get_submodule(attention), _ROWS, words[_ROWS])


def _take(
    argument: str, attention: nn.Module, positions: tuple[Any, ...], words: _Words
) -> tuple[tuple[Any, ...], _Words]:
    return positions, {**words, argument: getattr(attention, argument)}
