"""Layers that carry a state from token to token, over packed rows: the state begins at each row.

The modules here take the place of transformers' own, with the same parameters under the same names. Linear modules, which
may have adapters, see all tokens at once; what looks back, a causal convolution or a recurrent state, sees one row at a
time, so a row's result is what it would be alone. The state's arithmetic is transformers' own, written in torch, on every
device: kernels of other libraries are not called, for none has been compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu, softplus
from transformers import PreTrainedModel
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, torch_chunk_gated_delta_rule

from mlora_worker.model.attention import PackedRows

# What is decorated chooses another library's kernels where they are installed.
_DELTA_RULE: Callable[..., tuple[Tensor, Tensor | None]] = inspect.unwrap(torch_chunk_gated_delta_rule)


class PackedDeltaNet(Qwen3_5GatedDeltaNet):  # type: ignore[misc]  # transformers' classes have no types
    """Gated delta net: [1, tokens, size] -> the same."""

    def forward(self, hidden_states: Tensor, *, packed: PackedRows, **_: Any) -> Tensor:
        mixed, gate = self.in_proj_qkv(hidden_states), self.in_proj_z(hidden_states)
        beta = self.in_proj_b(hidden_states).sigmoid()
        step = softplus(self.in_proj_a(hidden_states).float() + self.dt_bias)
        decay = -self.A_log.float().exp() * step
        parts = (torch.split(one, list(packed.lengths), dim=1) for one in (mixed, decay, beta))
        outs = [self._row(*part) for part in zip(*parts, strict=True)]
        heads = torch.cat(outs, dim=1).reshape(-1, self.head_v_dim)
        normed: Tensor = self.norm(heads, gate.reshape(-1, self.head_v_dim))
        out: Tensor = self.out_proj(normed.reshape(1, packed.tokens, -1))
        return out

    def _row(self, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """[1, length, ...] of one row -> [1, length, value heads, size]."""
        # [1, length, heads, size] each.
        seen = silu(_looking_back(self.conv1d, mixed))
        query, key, value = torch.split(seen, [self.key_dim, self.key_dim, self.value_dim], dim=-1)
        out, _ = _DELTA_RULE(
            query.reshape(*seen.shape[:2], -1, self.head_k_dim),
            key.reshape(*seen.shape[:2], -1, self.head_k_dim),
            value.reshape(*seen.shape[:2], -1, self.head_v_dim),
            g=decay,
            beta=beta,
            use_qk_l2norm_in_kernel=True,
        )
        return out


class PackedShortConv(Lfm2ShortConv):  # type: ignore[misc]
    """Gated convolution over a few tokens: [1, tokens, size] -> the same."""

    def forward(self, hidden_states: Tensor, *, packed: PackedRows, **_: Any) -> Tensor:
        before, after, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        rows = (before * x).split(list(packed.lengths), dim=1)
        out: Tensor = self.out_proj(after * torch.cat([_looking_back(self.conv, row) for row in rows], dim=1))
        return out


_PACKED: dict[type[nn.Module], type[nn.Module]] = {
    Qwen3_5GatedDeltaNet: PackedDeltaNet,
    Lfm2ShortConv: PackedShortConv,
}


def begin_at_each_row(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Put these modules in the place of transformers' below ``model``, which is on the meta device; returns how many."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) in _PACKED
    ]
    for parent, name, child in found:
        with torch.device("meta"):
            setattr(parent, name, _PACKED[type(child)](model.base_model.config, child.layer_idx).to(dtype))
    return len(found)


def forget_shared_keys(model: PreTrainedModel) -> None:
    """Keys and values that layers leave for others, which such a model here does not have."""
    for module in model.modules():
        if getattr(module, "store_full_length_kv", False):
            setattr(module, "store_full_length_kv", False)  # noqa: B010 - a plain flag of transformers' module


def _looking_back(conv: nn.Conv1d, row: Tensor) -> Tensor:
    """[1, length, channels] -> the same: each channel's last tokens, with nothing before the row's first."""
    length = row.shape[1]
    out = conv1d(row.transpose(1, 2), conv.weight, conv.bias, padding=conv.padding, groups=conv.groups)
    return out[..., :length].transpose(1, 2)
