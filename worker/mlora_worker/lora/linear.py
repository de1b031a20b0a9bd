"""The module that takes a frozen linear's place in the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mlora_worker.lora.function import LinearWithProducts, Product


class AdaptedLinear(nn.Module):
    """A frozen linear plus the products of the microbatch that runs now; ``products`` is set before each
    forward.

    Backward uses what forward saw, so microbatches may be in flight at the same time.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.in_features, self.out_features = base.in_features, base.out_features
        self.products: tuple[Product, ...] = ()
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        if not self.products:
            return linear(x, self.weight, self.bias)
        y: Tensor = LinearWithProducts.apply(x, self._anchor, self.weight, self.bias, self.products)
        return y


def adapt_linears(root: nn.Module, linears: Mapping[str, nn.Linear]) -> dict[str, AdaptedLinear]:
    """Put an AdaptedLinear in the place of each of ``linears`` below ``root``; by the same keys."""
    adapted = {key: AdaptedLinear(module) for key, module in linears.items()}
    by_base = {linears[key]: module for key, module in adapted.items()}
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if child in by_base:
                setattr(parent, name, by_base[child])
    return adapted
