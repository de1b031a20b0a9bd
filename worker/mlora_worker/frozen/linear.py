"""The frozen linear module of a layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.frozen.weight import FrozenWeight

Freeze = Callable[[Tensor], FrozenWeight]  # of a matrix [out, in], which nobody else holds afterwards


class FrozenLinear(nn.Module):
    """What ``nn.Linear`` computes, with a weight of any kind."""

    bias: Tensor | None

    def __init__(self, weight: FrozenWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.weight(x, self.bias)
        return y


def plain_linear(_: str, linear: nn.Linear) -> FrozenLinear:
    return FrozenLinear(PlainWeight(linear.weight), linear.bias)


def freeze_linears(
    layer: nn.Module,
    frozen: Callable[[str, nn.Linear], FrozenLinear] = plain_linear,
    but: Callable[[str], bool] = lambda _: False,
) -> int:
    """Put ``frozen(path, module)`` in the place of each linear module below ``layer``, one after the other, ``but`` those
    paths; returns how many."""
    found = [
        (path, child)
        for path, child in layer.named_modules()
        if isinstance(child, nn.Linear) and not but(path)
    ]
    for path, child in found:
        parent, _, name = path.rpartition(".")
        setattr(layer.get_submodule(parent), name, frozen(path, child))
    return len(found)
