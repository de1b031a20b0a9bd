"""Layers that carry a state from token to token, or look back at a few, in the place of transformers' own: the same
parameters under the same names, and the state begins at each packed row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mlora_worker.model.attention import PackedRows
from mlora_worker.model.recurrent.delta_net import PackedDeltaNet, PackedNextDeltaNet
from mlora_worker.model.recurrent.looking_back import LookingBack, convolved
from mlora_worker.model.recurrent.mamba import PackedFalconMamba, PackedMamba, PackedNemotronMamba
from mlora_worker.model.recurrent.plain import (
    FalconH1Mixer,
    GraniteMoeHybridMambaLayer,
    Lfm2MoeShortConv,
    Lfm2ShortConv,
    NemotronHMamba2Mixer,
    Qwen3_5GatedDeltaNet,
    Qwen3_5MoeGatedDeltaNet,
    Qwen3NextGatedDeltaNet,
)


class PackedShortConv(LookingBack, Lfm2ShortConv):  # type: ignore[misc]
    """Gated convolution over a few tokens."""

    scans = False

    @property
    def convolution(self) -> nn.Conv1d:
        conv: nn.Conv1d = self.conv
        return conv

    def widths(self) -> tuple[int, ...]:
        return (self.conv.in_channels,) * 2

    def parts(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """What is multiplied after the convolution, what before it, and x."""
        before, after, x = self.in_proj(hidden).chunk(3, dim=-1)
        return after, before, x

    def looked(self, seen: Sequence[Tensor], packed: PackedRows) -> Tensor:
        before, x = seen
        return convolved(self, before * x, packed, then_silu=False)

    def finished(self, looked: Tensor, gate: Tensor, packed: PackedRows) -> Tensor:
        del packed
        return gate * looked


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
