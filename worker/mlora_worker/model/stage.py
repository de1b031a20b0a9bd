"""The modules of one stage and how tokens go through them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mlora_worker.model.architecture import Architecture
from mlora_worker.model.attention import PackedRows
from mlora_worker.model.loss import segment_losses


@dataclass(frozen=True, eq=False)
class Stage:
    """Frozen modules of stage ``index`` of ``stages``. ``layers`` are decoder layers ``layer_range`` of the
    model.
    """

    index: int
    stages: int
    architecture: Architecture
    layer_range: range
    layers: nn.ModuleList
    rotary: nn.Module
    embedding: nn.Embedding | None  # first stage
    norm: nn.Module | None  # last stage
    head_weight: Tensor | None  # [vocabulary, size], last stage
    linears: dict[str, nn.Linear]  # of these layers, by the path in the whole model
    dtype: torch.dtype
    device: torch.device

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def resident_bytes(self) -> int:
        """Bytes of the frozen weights; a tied head on one stage counts once."""
        modules = [
            self.layers,
            self.rotary,
            *(part for part in (self.embedding, self.norm) if part is not None),
        ]
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        if self.head_weight is not None:
            tensors.append(self.head_weight)
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())

    def embed(self, token_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, size]."""
        assert self.embedding is not None
        hidden: Tensor = self.embedding(token_ids)
        return hidden

    def run_layers(self, hidden: Tensor, rows: PackedRows) -> Tensor:
        """[tokens, size] -> [tokens, size] through this stage's decoder layers."""
        hidden = hidden[None]
        embeddings = self.rotary(hidden, position_ids=rows.position_ids)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=None,
                position_ids=rows.position_ids,
                position_embeddings=embeddings,
                packed=rows,
            )
        return hidden[0]

    def losses(self, hidden: Tensor, labels: Tensor, segment_tokens: tuple[int, ...]) -> Tensor:
        """[segments] float64: sums of cross entropies over each segment's supervised positions."""
        assert self.norm is not None
        assert self.head_weight is not None
        return segment_losses(hidden, labels, segment_tokens, self.norm, self.head_weight)
