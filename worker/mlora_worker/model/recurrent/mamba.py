"""Mamba 2 over packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import PretrainedConfig

from mlora_worker.model.attention import PackedRows
from mlora_worker.model.recurrent.looking_back import LookingBack, Scan, as_alone, by_row, convolved
from mlora_worker.model.recurrent.plain import (
    SCAN,
    FalconH1Mixer,
    GraniteMoeHybridMambaLayer,
    NemotronHMamba2Mixer,
)

_SILU = ("silu", "swish")


class _Mamba(LookingBack):
    """What the modules of all types share. Their attributes are transformers'."""

    intermediate_size: int
    conv_dim: int
    num_heads: int
    n_groups: int
    ssm_state_size: int
    chunk_size: int
    activation: str
    time_step_limit: tuple[float, float]
    act: nn.Module
    in_proj: nn.Module
    norm: nn.Module
    conv1d: nn.Conv1d
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor

    @property
    def convolution(self) -> nn.Conv1d:
        return self.conv1d

    def widths(self) -> tuple[int, ...]:
        return self.conv_dim, self.num_heads

    def parts(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Gates; x, b and c; what makes the steps."""
        sizes = [self.intermediate_size, *self.widths()]
        parts: tuple[Tensor, ...] = torch.split(self.in_proj(hidden), sizes, dim=-1)
        return parts

    def looked(self, seen: Sequence[Tensor], packed: PackedRows) -> Tensor:
        """-> [1, tokens, heads, size]."""
        mixed, step = seen
        with_silu = self.activation in _SILU
        mixed = convolved(self, mixed, packed, then_silu=with_silu)
        if not with_silu:
            mixed = by_row(self.act, packed, mixed)
        if self.kernels.scan is not None:
            return self._scanned(mixed, step, packed, self.kernels.scan)
        return by_row(self._row, packed, mixed, step)

    def finished(self, looked: Tensor, gate: Tensor, packed: PackedRows) -> Tensor:
        def of_row(looked: Tensor, gate: Tensor) -> Tensor:
            return self._normed(looked.flatten(2), gate).to(gate.dtype)

        if self.kernels.scan is not None:
            return of_row(looked, gate)
        return by_row(of_row, packed, looked, gate)

    def _normed(self, looked: Tensor, gate: Tensor) -> Tensor:
        normed: Tensor = self.norm(looked, gate)
        return normed

    def _row(self, mixed: Tensor, step: Tensor) -> Tensor:
        x, b, c = self._heads(mixed)
        return SCAN(
            x,
            step,
            -self.A_log.float().exp(),
            b,
            c,
            chunk_size=min(
                self.chunk_size, mixed.shape[1]
            ),  # a chunk is filled up with zeros, which cost as much
            D=self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            dt_limit=self.time_step_limit,
        )

    def _scanned(self, mixed: Tensor, step: Tensor, packed: PackedRows, scan: Scan) -> Tensor:
        """Of all rows, in float32."""
        x, b, c = self._heads(mixed)
        steps = (
            as_alone(softplus, packed, step + self.dt_bias.to(step.dtype))
            .clamp(*self.time_step_limit)
            .float()
        )
        each = self.num_heads // self.n_groups
        b, c = (one.repeat_interleave(each, dim=2, output_size=self.num_heads) for one in (b, c))
        moved = (x.float() * steps[..., None]).to(x.dtype)
        out = scan(c, b, moved, -self.A_log.float().exp() * steps, packed)
        skipped: Tensor = self.D.float()[:, None] * x.float()
        return out.float() + skipped

    def _heads(self, mixed: Tensor) -> tuple[Tensor, ...]:
        """[1, tokens, heads or groups, ...]: x, b and c."""
        state = self.n_groups * self.ssm_state_size
        parts = torch.split(mixed, [self.intermediate_size, state, state], dim=-1)
        counts = (self.num_heads, self.n_groups, self.n_groups)
        return tuple(one.reshape(1, mixed.shape[1], n, -1) for one, n in zip(parts, counts, strict=True))


class PackedMamba(_Mamba, GraniteMoeHybridMambaLayer):  # type: ignore[misc]  # transformers' classes have no types
    """Of Granite 4."""


class PackedNemotronMamba(_Mamba, NemotronHMamba2Mixer):  # type: ignore[misc]
    """Of Nemotron-H."""


class PackedFalconMamba(_Mamba, FalconH1Mixer):  # type: ignore[misc]
    """Of Falcon-H1: each part of the projection has a factor, and a gate may stand in the place of the norm."""

    def __init__(self, config: PretrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.factors = tuple(config.ssm_multipliers)

    def parts(self, hidden: Tensor) -> tuple[Tensor, ...]:
        inner, state = self.intermediate_size, self.n_groups * self.ssm_state_size
        projected = self.in_proj(hidden * self.ssm_in_multiplier)
        parts = torch.split(projected, [inner, inner, state, state, self.num_heads], dim=-1)
        gate, *mixed, step = (part * factor for part, factor in zip(parts, self.factors, strict=True))
        return gate, torch.cat(mixed, dim=-1), step

    def _normed(self, looked: Tensor, gate: Tensor) -> Tensor:
        return super()._normed(looked, gate) if self.mamba_rms_norm else looked * silu(gate)
