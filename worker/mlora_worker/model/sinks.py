"""Attention in which each head has a sink: a score beside those of the keys, behind which no value stands (gpt-oss).

A row's weights on its keys then add up to less than 1. Fused kernels of torch know no sinks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SinkAttention(torch.autograd.Function):
    """softmax([scale q k^T, sink]) [v, 0] of one row, where ``seen`` [length, length]; q, k, v [1, heads, length, size],
    sinks [heads].

    Scores are computed again in backward, so that what is kept grows with the row's length and not with its square.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, seen: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks, seen)
        ctx.scale = scale
        return _weights(query, key, sinks, seen, scale).to(value.dtype) @ value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, seen = ctx.saved_tensors
        weights = _weights(query, key, sinks, seen, ctx.scale)
        grad_value = weights.to(value.dtype).transpose(2, 3) @ grads[0]
        # d score = p (g - sum p g) scale, with g the gradient of p; that of the sink's weight is zero.
        grad = (grads[0] @ value.transpose(2, 3)).to(weights.dtype)
        grad = weights * (grad - (weights * grad).sum(-1, keepdim=True))
        grad = (grad * ctx.scale).to(query.dtype)
        return grad @ key, grad.transpose(2, 3) @ query, grad_value, None, None, None


def _weights(query: Tensor, key: Tensor, sinks: Tensor, seen: Tensor, scale: float) -> Tensor:
    """[1, heads, length, length], in float32 or better."""
    scores = query @ key.transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale)
    scores = scores.masked_fill_(~seen, -torch.inf)
    beside = sinks.to(scores.dtype)[None, :, None, None].expand(-1, -1, scores.shape[2], -1)
    return torch.cat([scores, beside], dim=-1).softmax(-1)[..., :-1]
