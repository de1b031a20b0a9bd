"""Several copies of the hidden state, of which a layer computes one and corrects the others (AltUp, Gemma 3n).

The layers are transformers' own. What its decoder does before the first and behind the last layer is here: the embedding is
spread out to all copies, each projected and as long as the first; in the end all are gathered to their mean. Tokens of each
task are computed by themselves, since how products and element-wise functions round depends on how many there are.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mlora_worker.frozen.experts import SegmentTokens
from mlora_worker.model.errors import UnsupportedModel

SPREAD: Final = "altup_projections"  # of the decoder, as transformers names them
GATHERED: Final = "altup_unembed_projections"
_SHORTEST = 1e-5  # mean square, below which a copy is not made longer


def check_copies(config: PretrainedConfig) -> None:
    """Raises UnsupportedModel where the copy that layers compute is none of them."""
    copies, active = config.altup_num_inputs, config.altup_active_idx
    if not 0 <= active < copies:
        raise UnsupportedModel(
            f"config.json of the base model cannot be used: altup_active_idx is {active}, which must be at least 0 "
            f"and below altup_num_inputs, which is {copies}"
        )


def _as_long_as(copy: Tensor, first: Tensor) -> Tensor:
    """``copy`` with the root mean square of ``first``; both [tokens, size]."""
    wanted = torch.mean(first**2, dim=-1, keepdim=True) ** 0.5
    own = torch.sqrt(torch.mean(copy**2, dim=-1, keepdim=True).clamp(min=_SHORTEST))
    return copy * wanted / own


class _End(nn.Module):
    """``projections``: of all copies but the first."""

    def __init__(self, projections: nn.ModuleList, segments: SegmentTokens) -> None:
        super().__init__()
        self.projections, self.segments = projections, segments
        self.as_long_as = _as_long_as


class Spread(_End):
    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, size] -> [tokens, copies * size], the first of which is ``hidden``."""
        cuts = list(self.segments.cut(len(hidden), hidden.device))
        return torch.cat([self._of(part) for part in torch.split(hidden, cuts)])

    def _of(self, hidden: Tensor) -> Tensor:
        others = [self.as_long_as(projection(hidden), hidden) for projection in self.projections]
        return torch.cat([hidden, *others], dim=1)


class Gathered(_End):
    def forward(self, hidden: Tensor) -> Tensor:
        """[copies, 1, tokens, size] -> [1, tokens, size]."""
        cuts = list(self.segments.cut(hidden.shape[2], hidden.device))
        return torch.cat([self._of(part) for part in torch.split(hidden, cuts, dim=2)], dim=1)

    def _of(self, hidden: Tensor) -> Tensor:
        first, *others = hidden
        pairs = zip(self.projections, others, strict=True)
        made = [self.as_long_as(projection(other), first) for projection, other in pairs]
        return torch.mean(torch.stack([first, *made]), dim=0)


class CutAltUp(nn.Module):
    """What a layer calls of its AltUp, for the tokens of each segment by themselves."""

    def __init__(self, altup: Any, segments: SegmentTokens) -> None:
        super().__init__()
        self.altup, self.segments = altup, segments

    def predict(self, hidden_states: Tensor) -> Tensor:
        """[copies, 1, tokens, size] -> the same."""
        parts = [
            self.altup.predict(part) for part in torch.split(hidden_states, self._cuts(hidden_states), dim=2)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def correct(self, predictions: Tensor, activated: Tensor) -> Tensor:
        """``activated`` [1, tokens, size] -> [copies, 1, tokens, size]."""
        cuts = self._cuts(predictions)
        pairs = zip(torch.split(predictions, cuts, dim=2), torch.split(activated, cuts, dim=1), strict=True)
        parts = [self.altup.correct(*pair) for pair in pairs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def scale_corrected_output(self, corrected: Tensor) -> Tensor:
        scaled: Tensor = self.altup.scale_corrected_output(corrected)
        return scaled

    def _cuts(self, hidden: Tensor) -> list[int]:
        return list(self.segments.cut(hidden.shape[2], hidden.device))
