"""Inputs that each decoder layer has for itself: a token's row of a table, by its id, and a projection of its embedding.

Nothing trainable lies before them, so they have no gradient. The first stage, which alone knows the ids, makes those of all
layers; behind it they travel with the hidden states.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mlora_worker.frozen.experts import SegmentTokens
from mlora_worker.model.errors import UnsupportedModel

# Of the decoder, as transformers names them.
TABLE: Final = "embed_tokens_per_layer"
PARTS: Final = (TABLE, "per_layer_model_projection", "per_layer_projection_norm")


def layer_inputs_of(model: PreTrainedModel) -> int:
    """Numbers of a token that each layer gets; 0: none."""
    decoder: Any = model.base_model
    return int(decoder.hidden_size_per_layer_input) if getattr(decoder, TABLE, None) is not None else 0


def check_not_quantised(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel where files have the projection packed: what that makes of it has not been compared."""
    if layer_inputs_of(model) and getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedModel(
            f"a quantised checkpoint of {model.config.model_type} with hidden_size_per_layer_input is not supported: use "
            "the checkpoint with plain float weights, with model.quantization if it must be small"
        )


class LayerInputs(nn.Module):
    """[tokens] ids and [tokens, size] embeddings -> [tokens, layers * numbers]; by the decoder's own arithmetic."""

    def __init__(self, decoder: Any, segments: SegmentTokens) -> None:
        """``decoder``: with these parts filled; it keeps nothing else."""
        super().__init__()
        for name in [name for name, _ in decoder.named_children() if name not in PARTS]:
            delattr(decoder, name)
        self.decoder, self.segments = decoder, segments

    def forward(self, token_ids: Tensor, embeddings: Tensor) -> Tensor:
        """Rows of each segment are multiplied by themselves."""
        cuts = list(self.segments.cut(len(token_ids), token_ids.device))
        parts = zip(torch.split(token_ids, cuts), torch.split(embeddings, cuts), strict=True)
        return torch.cat([self._of(ids[None], hidden[None]) for ids, hidden in parts])

    def _of(self, ids: Tensor, hidden: Tensor) -> Tensor:
        found = self.decoder.get_per_layer_inputs(ids)
        made: Tensor = self.decoder.project_per_layer_inputs(hidden, found)
        return made[0].flatten(1)
