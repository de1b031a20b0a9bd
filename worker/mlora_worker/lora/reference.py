"""The low-rank products in plain autograd: what ``function`` must equal, written to be read rather than to be
fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from mlora_worker.lora.groups import GroupSegment


def linears_with_products(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    segments: Sequence[GroupSegment],
    leaves: Sequence[tuple[Tensor, Sequence[Tensor]]],
) -> list[Tensor]:
    """[tokens, in] -> per module [tokens, out]. ``leaves``: ``a`` and ``b`` of each segment, requiring gradients."""
    outputs = [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    for segment, (a, bs) in zip(segments, leaves, strict=True):
        own = x[segment.rows]
        if segment.mask is not None:
            own = torch.where(segment.mask.bits(slice(None)) != 0, own, 0.0) * segment.mask.rescale
        around = (segment.rows.start, len(x) - segment.rows.stop)
        for j, (position, b) in enumerate(zip(segment.members, bs, strict=True)):
            low = linear(own, a[j * segment.rank : (j + 1) * segment.rank])
            outputs[position] = outputs[position] + pad(segment.scale * linear(low, b), (0, 0, *around))
    return outputs
