"""Causal attention on a CPU, row by row of a packed tensor: a few products of the matrix library for a block of queries.

torch's own attention cuts heads and queries into pieces that are small for the library. Here all heads are one batched
product, ``_BLOCK`` queries at a time against the keys that they see, and what lies between two products (scale, exponent,
sum) is one compiled pass over a block that a cache holds. Scores are computed again in the backward, so what is kept grows
with a row's length and not with its square (Dao et al., FlashAttention, 2022).

Products and sums are float32, also of half-precision states. A row is computed by itself, in blocks that its own length
decides, so its bits know nothing of the rows beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mlora_worker.model import row_attention_kernels as kernels

_BLOCK = 64  # queries: of 32, 64 and 128 the fastest for rows of 100 to 1,000 tokens
_MOST_THREADS = 2  # beyond, torch's small pieces are spread better
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def computes_rows(query: Tensor) -> bool:
    """Whether rows are computed here; else torch computes them."""
    few = torch.get_num_threads() <= _MOST_THREADS
    return kernels.AVAILABLE and few and query.device.type == "cpu" and query.dtype in _TYPES


def row_attention(
    query: Tensor, key: Tensor, value: Tensor, rows: Sequence[slice], scale: float, window: int | None
) -> Tensor:
    """query [1, heads, tokens, size], key [1, key heads, tokens, size], value [1, key heads, tokens, value size] ->
    [1, tokens, heads, value size].

    ``rows``: the tokens of each. ``window``: a token sees itself and the ``window - 1`` tokens before it.
    """
    out: Tensor = _RowAttention.apply(query, key, value, rows, scale, window)
    return out


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Sequence[slice],
        scale: float,
        window: int | None,
    ) -> Tensor:
        heads, tokens = query.shape[1:3]
        out = query.new_empty(tokens, heads, value.shape[-1])
        logs = query.new_empty(heads, tokens, dtype=torch.float32)
        for one in rows:
            q, k, v = (_own(tensor[0, :, one]) for tensor in (query, key, value))
            row_out, row_logs = out[one].transpose(0, 1), logs[:, one]
            for own, keys in _blocks(q.shape[1], window):
                scores = _grouped(q[:, own], len(k)) @ k[:, keys].transpose(1, 2)
                log, inverse = (scores.new_empty(scores.shape[0] * scores.shape[1]) for _ in range(2))
                kernels.softmax(scores, own, keys, window, scale, log, inverse)
                part = (scores @ v[:, keys]).mul_(inverse.view(len(k), -1, 1))
                row_out[:, own] = part.view(heads, -1, part.shape[-1])
                row_logs[:, own] = log.view(heads, -1)
        ctx.save_for_backward(query, key, value, out, logs)
        ctx.rows, ctx.scale, ctx.window = rows, scale, window
        return out[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logs = ctx.saved_tensors
        found = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for one in ctx.rows:
            q, k, v = (_own(tensor[0, :, one]) for tensor in (query, key, value))
            grad, row_out = (_own(tensor[one].transpose(0, 1)) for tensor in (grads[0][0], out))
            dots, row_logs = row_out.mul_(grad).sum(-1), logs[:, one]
            grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
            for own, keys in _blocks(q.shape[1], ctx.window):
                own_q, own_grad = _grouped(q[:, own], len(k)), _grouped(grad[:, own], len(k))
                weights = own_q @ k[:, keys].transpose(1, 2)
                slopes = own_grad @ v[:, keys].transpose(1, 2)
                log, dot = (tensor[:, own].reshape(-1) for tensor in (row_logs, dots))
                kernels.slopes(weights, slopes, own, keys, ctx.window, ctx.scale, log, dot)
                grad_v[:, keys].baddbmm_(weights.transpose(1, 2), own_grad)
                grad_q[:, own] = (slopes @ k[:, keys]).view(len(q), -1, q.shape[-1])
                grad_k[:, keys].baddbmm_(slopes.transpose(1, 2), own_q)
            made = (grad_q.mul_(ctx.scale), grad_k.mul_(ctx.scale), grad_v)
            for whole, part in zip(found, made, strict=True):
                whole[0, :, one] = part
        return (*found, None, None, None)


def _own(row: Tensor) -> Tensor:
    """A copy in float32: the library may add up in another order where memory begins elsewhere, and where a row begins in
    the packed tensor is its neighbours' doing."""
    return torch.empty(row.shape, dtype=torch.float32).copy_(row)


def _blocks(length: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Queries of a row that are worked on together, and the keys that any of them sees."""
    for first in range(0, length, _BLOCK):
        last = min(first + _BLOCK, length)
        yield slice(first, last), slice(0 if window is None else max(0, first - window + 1), last)


def _grouped(heads: Tensor, key_heads: int) -> Tensor:
    """[heads, queries, size] -> [key heads, queries of all that share the keys, size]."""
    return heads.reshape(key_heads, -1, heads.shape[-1])
