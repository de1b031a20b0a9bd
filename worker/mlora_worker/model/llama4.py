"""Llama 4's attention and mixture over packed rows, in the place of transformers' own, with the same parameters.

1. Layers that rotate may attend in chunks. A chunk begins at its row's start and never sees another, so for the attention
   each is a row of its own.
2. Layers that do not rotate scale their queries by the position in the row. transformers counts from the start of the
   whole tensor; a packed row has the positions that it has alone.
3. The router's weights, which do not add up to 1, multiply what goes into the experts. transformers sends all tokens
   through all experts, most of them weighted by zero, which adds nothing; here each token goes through its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4Router, Llama4TextAttention, Llama4TextMoe

from mlora_worker.model.attention import PackedRows, packed_attention
from mlora_worker.model.errors import UnsupportedModel

_CHUNKED = "chunked_attention"


def rotated_pairs(heads: Tensor, turns: Tensor) -> Tensor:
    """heads [1, tokens, heads, size], of which elements 2i and 2i + 1 turn together; turns [1, tokens, size / 2], complex.

    In float32, as transformers has it, but by real numbers: how torch rounds the last complex products of a tensor may
    depend on how many there are.
    """
    even, odd = heads.float().reshape(*heads.shape[:-1], -1, 2).unbind(-1)
    cos, sin = turns.real[:, :, None], turns.imag[:, :, None]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).type_as(heads)


class PackedLlama4Attention(Llama4TextAttention):  # type: ignore[misc]  # transformers' classes have no types
    """[1, tokens, size] -> the same."""

    rotated = staticmethod(rotated_pairs)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor,
        *,
        packed: PackedRows,
        **_: Any,
    ) -> tuple[Tensor, None]:
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(heads) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.use_rope:
            query, key = (self.rotated(one, position_embeddings) for one in (query, key))
            if hasattr(self, "qk_norm"):
                query, key = self.qk_norm(query), self.qk_norm(key)
        elif self.attn_temperature_tuning:
            query = (query * self._temperatures(packed)).to(query.dtype)
        chunked = self.config.layer_types[self.layer_idx] == _CHUNKED
        out, _nothing = packed_attention(
            self,
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            None,
            packed=packed.in_chunks(self.config.attention_chunk_size) if chunked else packed,
            scaling=self.scaling,
        )
        return self.o_proj(out.flatten(2)), None

    def _temperatures(self, packed: PackedRows) -> Tensor:
        """[1, tokens, 1, 1] float32. From a table of one length: how torch computes the last elements of a tensor depends
        on how many there are."""
        levels = self.config.max_position_embeddings // self.floor_scale + 1
        logarithms = torch.log1p(torch.arange(levels, dtype=torch.float32, device=packed.device))
        table: Tensor = logarithms * self.attn_scale + 1.0
        return table[(packed.position_ids + 1) // self.floor_scale][..., None, None]


class ChoosingRouter(Llama4Router):  # type: ignore[misc]
    """[tokens, size] -> logits [tokens, experts], and of the chosen experts weights and numbers [tokens, k]."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states, self.weight)
        best, chosen = logits.topk(self.top_k, dim=1)
        return logits, best.float().sigmoid().to(logits.dtype), chosen


class RoutedLlama4Moe(Llama4TextMoe):  # type: ignore[misc]
    """Its experts take what they multiply, the number of each token's expert, and what to multiply their results by."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        flat = hidden_states.reshape(-1, self.hidden_dim)
        logits, weights, chosen = self.router(flat)
        y = self.shared_expert(flat)
        for weight, one in zip(weights.split(1, dim=1), chosen.split(1, dim=1), strict=True):
            y = y + self.experts(flat * weight, one, torch.ones_like(weight))
        return y, logits


_OWN: dict[type[nn.Module], type[nn.Module]] = {
    Llama4TextAttention: PackedLlama4Attention,
    Llama4Router: ChoosingRouter,
    Llama4TextMoe: RoutedLlama4Moe,
}


def pack_llama4(model: PreTrainedModel) -> None:
    """Give such modules below ``model`` their forward over packed rows; other models stay as they are. Raises
    UnsupportedModel for chunks and steps of positions that cannot be counted."""
    for module in model.modules():
        own = _OWN.get(type(module))
        if own is None:
            continue
        module.__class__ = own
        if isinstance(module, PackedLlama4Attention):
            _check_counts(module)


def _check_counts(attention: Any) -> None:
    config, counts = attention.config, {}
    if config.layer_types[attention.layer_idx] == _CHUNKED:
        counts["attention_chunk_size"] = config.attention_chunk_size
    if config.attn_temperature_tuning:
        counts["floor_scale"] = config.floor_scale
    wrong = [f"{name} is {count}" for name, count in counts.items() if count is None or count < 1]
    if wrong:
        raise UnsupportedModel(
            f"config.json of the base model cannot be used: {', '.join(wrong)}, which must be at least 1"
        )
