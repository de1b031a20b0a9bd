"""The frozen linear module of a layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.frozen.weight import FrozenWeight

Freeze = Callable[[Tensor], FrozenWeight]


class FrozenLinear(nn.Module):
    """What ``nn.Linear`` computes, with a weight of any kind."""

    def __init__(self, weight: FrozenWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.weight(x, self.bias)
        return y


def freeze_linears(layer: nn.Module, freeze: Freeze = PlainWeight) -> int:
    """Put a frozen module in the place of each linear module below ``layer``; returns how many.

    ``freeze`` makes a weight of a matrix [out, in], which nobody else holds afterwards.
    """
    found = [
        (parent, name, child)
        for parent in layer.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    for parent, name, child in found:
        setattr(parent, name, FrozenLinear(freeze(child.weight), child.bias))
    return len(found)
