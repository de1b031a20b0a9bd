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
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
    mamba2_chunk_scan,
)
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeShortConv
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, torch_chunk_gated_delta_rule
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from mlora_worker.model.attention import PackedRows

# What is decorated chooses another library's kernels where they are installed.
_DELTA_RULE: Callable[..., tuple[Tensor, Tensor | None]] = inspect.unwrap(torch_chunk_gated_delta_rule)
_SCAN: Callable[..., Tensor] = inspect.unwrap(mamba2_chunk_scan)


class PackedDeltaNet(Qwen3_5GatedDeltaNet):  # type: ignore[misc]  # transformers' classes have no types
    """Gated delta net: [1, tokens, size] -> the same."""

    def forward(self, hidden_states: Tensor, *, packed: PackedRows, **_: Any) -> Tensor:
        parts = (torch.split(one, list(packed.lengths), dim=1) for one in self._projected(hidden_states))
        out: Tensor = self.out_proj(
            torch.cat([_of_row(self, *row) for row in zip(*parts, strict=True)], dim=1)
        )
        return out

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[1, tokens, ...]: queries, keys and values; gates; what makes the decay, and beta."""
        return (
            self.in_proj_qkv(hidden),
            self.in_proj_z(hidden),
            self.in_proj_a(hidden),
            self.in_proj_b(hidden),
        )


class PackedNextDeltaNet(Qwen3NextGatedDeltaNet):  # type: ignore[misc]
    """The same of Qwen3-Next, whose projections are fused by groups of heads."""

    forward = PackedDeltaNet.forward

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *heads, gate, b, a = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(hidden), self.in_proj_ba(hidden)
        )
        return torch.cat([one.flatten(2) for one in heads], dim=-1), gate, a, b


def _of_row(net: Any, mixed: Tensor, gate: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """[1, length, ...] of one row -> [1, length, inner size]. What is done element by element, too: how torch computes the
    last elements of a tensor depends on how many there are."""
    # [1, length, heads, size] each.
    seen = silu(_looking_back(net.conv1d, mixed))
    query, key, value = torch.split(seen, [net.key_dim, net.key_dim, net.value_dim], dim=-1)
    out, _ = _DELTA_RULE(
        query.reshape(*seen.shape[:2], -1, net.head_k_dim),
        key.reshape(*seen.shape[:2], -1, net.head_k_dim),
        value.reshape(*seen.shape[:2], -1, net.head_v_dim),
        g=-net.A_log.float().exp() * softplus(a.float() + net.dt_bias),
        beta=b.sigmoid(),
        use_qk_l2norm_in_kernel=True,
    )
    normed: Tensor = net.norm(out.reshape(-1, net.head_v_dim), gate.reshape(-1, net.head_v_dim))
    return normed.reshape(1, mixed.shape[1], -1)


class PackedMamba(GraniteMoeHybridMambaLayer):  # type: ignore[misc]
    """Mamba 2: [1, tokens, size] -> the same."""

    def forward(self, hidden_states: Tensor, *, packed: PackedRows, **_: Any) -> Tensor:
        sizes = [self.intermediate_size, self.conv_dim, self.num_heads]
        rows = self.in_proj(hidden_states).split(list(packed.lengths), dim=1)
        scanned = [_scan_of_row(self, *row.split(sizes, dim=-1)) for row in rows]
        out: Tensor = self.out_proj(torch.cat(scanned, dim=1))
        return out


class PackedNemotronMamba(NemotronHMamba2Mixer):  # type: ignore[misc]
    """The same of Nemotron-H."""

    forward = PackedMamba.forward


class PackedFalconMamba(FalconH1Mixer):  # type: ignore[misc]
    """The same of Falcon-H1: each part of the projection has a factor, and a gate may stand in the place of the norm."""

    def __init__(self, config: PretrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.factors = tuple(config.ssm_multipliers)

    def forward(self, hidden_states: Tensor, *, packed: PackedRows, **_: Any) -> Tensor:
        inner, state = self.intermediate_size, self.n_groups * self.ssm_state_size
        projected = self.in_proj(hidden_states * self.ssm_in_multiplier)
        parts = projected.split([inner, inner, state, state, self.num_heads], dim=-1)
        gate, *mixed, step = (part * factor for part, factor in zip(parts, self.factors, strict=True))
        rows = (one.split(list(packed.lengths), dim=1) for one in (gate, torch.cat(mixed, dim=-1), step))
        scanned = [_scan_of_row(self, *row) for row in zip(*rows, strict=True)]
        out: Tensor = self.out_proj(torch.cat(scanned, dim=1))
        return out


def _scan_of_row(mamba: Any, gate: Tensor, mixed: Tensor, step: Tensor) -> Tensor:
    """[1, length, ...] of one row -> [1, length, inner size]."""
    length, state = mixed.shape[1], mamba.n_groups * mamba.ssm_state_size
    seen = mamba.act(_looking_back(mamba.conv1d, mixed))
    x, b, c = seen.split([mamba.intermediate_size, state, state], dim=-1)
    scanned = _SCAN(
        x.reshape(1, length, mamba.num_heads, -1),
        step,
        -mamba.A_log.float().exp(),
        b.reshape(1, length, mamba.n_groups, -1),
        c.reshape(1, length, mamba.n_groups, -1),
        chunk_size=min(mamba.chunk_size, length),  # a chunk is filled up with zeros, which cost as much
        D=mamba.D,
        dt_bias=mamba.dt_bias,
        dt_softplus=True,
        dt_limit=mamba.time_step_limit,
    ).reshape(1, length, -1)
    normed: Tensor = (
        mamba.norm(scanned, gate) if getattr(mamba, "mamba_rms_norm", True) else scanned * silu(gate)
    )
    return normed.to(mixed.dtype)


class PackedShortConv(Lfm2ShortConv):  # type: ignore[misc]
    """Gated convolution over a few tokens: [1, tokens, size] -> the same."""

    def forward(self, hidden_states: Tensor, *, packed: PackedRows, **_: Any) -> Tensor:
        before, after, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        rows = (before * x).split(list(packed.lengths), dim=1)
        out: Tensor = self.out_proj(after * torch.cat([_looking_back(self.conv, row) for row in rows], dim=1))
        return out


_PACKED: dict[type[nn.Module], type[nn.Module]] = {
    Qwen3_5GatedDeltaNet: PackedDeltaNet,
    Qwen3_5MoeGatedDeltaNet: PackedDeltaNet,
    Qwen3NextGatedDeltaNet: PackedNextDeltaNet,
    FalconH1Mixer: PackedFalconMamba,
    GraniteMoeHybridMambaLayer: PackedMamba,
    Lfm2ShortConv: PackedShortConv,
    Lfm2MoeShortConv: PackedShortConv,
    NemotronHMamba2Mixer: PackedNemotronMamba,
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
