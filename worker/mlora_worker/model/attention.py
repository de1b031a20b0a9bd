"""Causal attention over packed rows, registered with transformers so that models stay untouched.

A packed tensor holds rows one after the other; a token sees the earlier tokens of its own row only. The
boundaries travel as the layer argument ``packed``; no mask over the whole tensor is ever built. On the CPU
each row is computed by itself (``row_attention``), so its result cannot depend on the rows beside it. On CUDA,
half-precision types use torch's variable-length flash attention; float32 is computed row by row there, too, and so are
capped scores and sinks, which flash attention does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from mlora_worker.model.row_attention import computes_rows, row_attention
from mlora_worker.model.sinks import SinkAttention
from mlora_worker.model.transfer import to_device
from mlora_worker.runtime.precision import product_dtype

varlen_attn: Any
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch < 2.10
    varlen_attn = None
_VARLEN_OPTIONS = frozenset(signature(varlen_attn).parameters if varlen_attn is not None else ())
# The first versions know no windows: there, rows are computed one by one. torch 2.11 knows no grouped heads: there, key
# heads are repeated.
HAS_VARLEN = "window_size" in _VARLEN_OPTIONS
HAS_GROUPED_HEADS = "enable_gqa" in _VARLEN_OPTIONS

PACKED_ATTENTION = "mlora_packed"


@dataclass(frozen=True)
class PackedRows:
    """Where rows begin and end in a packed tensor. ``lengths``: tokens of each row, all positive. ``segments``: tokens of
    each task's rows; empty: all are one task's."""

    lengths: tuple[int, ...]
    device: torch.device
    segments: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Where each row's tokens lie."""
        ends = accumulate(self.lengths)
        return tuple(slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True))

    @cached_property
    def position_ids(self) -> Tensor:
        """[1, tokens] int64: each row counts from 0."""
        return to_device(torch.cat([torch.arange(length) for length in self.lengths])[None], self.device)

    @cached_property
    def boundaries(self) -> Tensor:
        """[rows + 1] int32: where each row starts, and the end."""
        return to_device(self.boundaries_on_host, self.device)

    @cached_property
    def boundaries_on_host(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)

    @cached_property
    def _chunk_tables(self) -> dict[int, Tensor]:
        return {}

    def chunks(self, size: int) -> Tensor:
        """[chunks, 2] int32: rows cut into chunks of ``size`` tokens from their first one on; of each chunk its row, and
        which one of the row's it is. Kept for the other layers."""
        if size not in self._chunk_tables:
            cut = [(row, i) for row, n in enumerate(self.lengths) for i in range(-(-n // size))]
            self._chunk_tables[size] = to_device(torch.tensor(cut, dtype=torch.int32), self.device)
        return self._chunk_tables[size]

    @cached_property
    def _cut_rows(self) -> dict[int, PackedRows]:
        return {}

    def in_chunks(self, size: int) -> PackedRows:
        """Each row cut into rows of ``size`` tokens, the last of which may be shorter. Kept for the other layers."""
        if self.longest <= size:
            return self
        if size not in self._cut_rows:
            chunks = (
                min(size, length - start) for length in self.lengths for start in range(0, length, size)
            )
            self._cut_rows[size] = PackedRows(tuple(chunks), self.device, self.segments)
        return self._cut_rows[size]

    @cached_property
    def _window_masks(self) -> dict[tuple[int, int], Tensor]:
        return {}

    def window_mask(self, length: int, window: int) -> Tensor:
        """[length, length] bool: which keys a query of one row sees. Kept for the other layers."""
        if (length, window) not in self._window_masks:
            distance = torch.arange(length, device=self.device)[:, None] - torch.arange(
                length, device=self.device
            )
            self._window_masks[length, window] = (distance >= 0) & (distance < window)
        return self._window_masks[length, window]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedRows,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    query [1, heads, tokens, size], key and value [1, key heads, tokens, size]; ``sliding_window``: a token
    sees itself and the ``sliding_window - 1`` tokens before it; ``softcap``: scaled scores become
    ``softcap * tanh(scores / softcap)``; ``s_aux`` [heads]: sinks. Returns [1, tokens, heads, size].
    """
    del module, attention_mask  # the boundaries say it all
    if options.get("position_bias") is not None or dropout:
        raise ValueError(f"packed attention does not know {'dropout' if dropout else 'position_bias'}")
    plain = softcap is None and s_aux is None
    if plain and computes_rows(query):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return row_attention(query, key, value, packed.slices, scale, sliding_window), None
    size = value.shape[-1]
    if (
        size < query.shape[-1]
    ):  # latent attention: fused kernels want sizes that are alike, and zeros change nothing
        value = pad(value, (0, query.shape[-1] - size))
    half = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    if HAS_VARLEN and half and plain:
        out = attention_of_packed_halves(query, key, value, packed, scaling, sliding_window)
    else:
        out = _row_by_row(query, key, value, packed, scaling, sliding_window, softcap, s_aux)
    return out[..., :size], None


def attention_of_packed_halves(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedRows, scaling: float | None, window: int | None
) -> Tensor:
    """As ``packed_attention``, for half precision on CUDA."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and not HAS_GROUPED_HEADS:
        key, value = _repeat(key, groups), _repeat(value, groups)
    # An index instead of squeeze would fill and copy in the backward.
    # Flash attention's kernels take any lengths; cuDNN would plan anew for each longest row.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out: Tensor = varlen_attn(
            query.squeeze(0).transpose(0, 1),
            key.squeeze(0).transpose(0, 1),
            value.squeeze(0).transpose(0, 1),
            packed.boundaries,
            packed.boundaries,
            packed.longest,
            packed.longest,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            **({"enable_gqa": groups > 1} if HAS_GROUPED_HEADS else {}),
        )
    return out.unsqueeze(0)


def _row_by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedRows,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    groups, dtype = query.shape[1] // key.shape[1], query.dtype
    wide = product_dtype(dtype, query.device)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    plain = softcap is None and sinks is None
    grouped = groups > 1 and plain and _knows_grouped_heads(query.device.type, wide)
    if groups > 1 and not grouped:
        key, value = _repeat(key, groups), _repeat(value, groups)
    # split has one backward node for all rows; slices would each make a gradient of the whole tensor.
    outs = []
    for row_query, row_key, row_value in zip(*_split((query, key, value), packed.lengths), strict=True):
        length = row_query.shape[2]
        if not plain:
            scale = scaling if scaling is not None else row_query.shape[-1] ** -0.5
            seen = packed.window_mask(length, min(window or length, length))
            if sinks is not None:
                out = SinkAttention.apply(row_query, row_key, row_value, sinks, seen, scale)
            else:
                out = CappedAttention.apply(row_query, row_key, row_value, seen, scale, softcap)
            outs.append(out.transpose(1, 2))
            continue
        mask = packed.window_mask(length, window) if window is not None and window < length else None
        out = scaled_dot_product_attention(
            row_query,
            row_key,
            row_value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        outs.append(out.transpose(1, 2))
    return torch.cat(outs, dim=1).to(dtype)


@cache
def _knows_grouped_heads(device: str, dtype: torch.dtype) -> bool:
    """Whether attention in blocks, which keeps no scores, takes fewer key heads than query heads as they are. Where it does
    not, torch would take the way that keeps them."""
    query, key = (torch.zeros(1, heads, 2, 8, device=device, dtype=dtype) for heads in (2, 1))
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    except RuntimeError:
        return False
    return True


class CappedAttention(torch.autograd.Function):
    """softmax(cap * tanh(scale / cap * q k^T)) v of one row, where ``seen`` [length, length]; all [1, heads, length, size].

    Scores are computed again in backward, so that what is kept grows with the row's length and not with its square.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, cap: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, seen)
        ctx.scale, ctx.cap = scale, cap
        return _capped(query, key, seen, scale, cap)[0].to(value.dtype) @ value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, seen = ctx.saved_tensors
        probabilities, bent = _capped(query, key, seen, ctx.scale, ctx.cap)
        grad_value = probabilities.to(value.dtype).transpose(2, 3) @ grads[0]
        # d score = p (g - sum p g) (1 - tanh^2) scale, with g the gradient of p.
        grad = (grads[0] @ value.transpose(2, 3)).to(probabilities.dtype)
        grad = probabilities * (grad - (probabilities * grad).sum(-1, keepdim=True))
        grad = (grad * (1 - bent.square()) * ctx.scale).to(query.dtype)
        return grad @ key, grad.transpose(2, 3) @ query, grad_value, None, None, None


def _capped(query: Tensor, key: Tensor, seen: Tensor, scale: float, cap: float) -> tuple[Tensor, Tensor]:
    """Probabilities and the tanh of scores, in float32 or better."""
    scores = query @ key.transpose(2, 3)
    bent = (scores.to(torch.promote_types(scores.dtype, torch.float32)) * (scale / cap)).tanh_()
    return (bent * cap).masked_fill_(~seen, -torch.inf).softmax(-1), bent


def _repeat(heads: Tensor, times: int) -> Tensor:
    """[1, heads, tokens, size] -> [1, heads * times, tokens, size]: each head ``times`` times in a row."""
    return heads[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


def _split(tensors: Sequence[Tensor], lengths: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    return [torch.split(tensor, list(lengths), dim=2) for tensor in tensors]


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)
