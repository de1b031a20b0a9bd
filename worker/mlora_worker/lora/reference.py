"""The low-rank products in plain autograd: what ``function`` must equal, written to be read rather than to be
fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from mlora_worker.lora.function import Product


def linear_with_products(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    products: Sequence[Product],
    ab: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """[tokens, in] -> [tokens, out]. ``ab``: A and B of each product, as leaves that require gradients."""
    parts = []
    position = 0
    for product, (a, b) in zip(products, ab, strict=True):
        own = x[product.rows]
        dropped = own
        if product.mask is not None:
            dropped = torch.where(product.mask.bits(slice(None)) != 0, own, 0.0) * product.mask.rescale
        parts.append(linear(x[position : product.rows.start], weight, bias))
        parts.append(linear(own, weight, bias) + product.scale * linear(linear(dropped, a), b))
        position = product.rows.stop
    parts.append(linear(x[position:], weight, bias))
    return torch.cat(parts)
