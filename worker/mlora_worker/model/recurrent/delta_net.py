"""Gated delta nets over packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from mlora_worker.model.attention import PackedRows
from mlora_worker.model.recurrent.looking_back import LookingBack, as_alone, by_row, convolved
from mlora_worker.model.recurrent.plain import DELTA_RULE, Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet


class PackedDeltaNet(LookingBack, Qwen3_5GatedDeltaNet):  # type: ignore[misc]  # transformers' classes have no types
    """Gated delta net."""

    @property
    def convolution(self) -> nn.Conv1d:
        conv: nn.Conv1d = self.conv1d
        return conv

    def widths(self) -> tuple[int, ...]:
        return self.conv_dim, self.num_v_heads, self.num_v_heads

    def parts(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Gates; queries, keys and values; what makes the decay, and beta."""
        return (
            self.in_proj_z(hidden),
            self.in_proj_qkv(hidden),
            self.in_proj_a(hidden),
            self.in_proj_b(hidden),
        )

    def looked(self, seen: Sequence[Tensor], packed: PackedRows) -> Tensor:
        """-> [1, tokens, heads, size]."""
        mixed, a, b = seen
        mixed = convolved(self, mixed, packed, then_silu=True)
        decay = -self.A_log.float().exp() * as_alone(softplus, packed, a.float() + self.dt_bias)
        beta = as_alone(torch.sigmoid, packed, b)
        query, key, value = (
            part.reshape(1, mixed.shape[1], -1, size)
            for part, size in zip(
                torch.split(mixed, [self.key_dim, self.key_dim, self.value_dim], dim=-1),
                (self.head_k_dim, self.head_k_dim, self.head_v_dim),
                strict=True,
            )
        )
        if self.kernels.delta_rule is not None:
            return self.kernels.delta_rule(query, key, value, decay, beta, packed)

        def of_row(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
            return DELTA_RULE(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]

        return by_row(of_row, packed, query, key, value, decay, beta)

    def finished(self, looked: Tensor, gate: Tensor, packed: PackedRows) -> Tensor:
        def of_row(looked: Tensor, gate: Tensor) -> Tensor:
            size = self.head_v_dim
            normed: Tensor = self.norm(looked.reshape(-1, size), gate.reshape(-1, size))
            return normed.reshape(1, gate.shape[1], -1)

        if self.kernels.delta_rule is not None:
            return of_row(looked, gate)
        return by_row(of_row, packed, looked, gate)


class PackedNextDeltaNet(LookingBack, Qwen3NextGatedDeltaNet):  # type: ignore[misc]
    """The same of Qwen3-Next, whose projections are fused by groups of heads."""

    convolution, widths = PackedDeltaNet.convolution, PackedDeltaNet.widths
    looked, finished = PackedDeltaNet.looked, PackedDeltaNet.finished

    def parts(self, hidden: Tensor) -> tuple[Tensor, ...]:
        *heads, gate, b, a = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(hidden), self.in_proj_ba(hidden)
        )
        return gate, torch.cat([one.flatten(2) for one in heads], dim=-1), a, b
