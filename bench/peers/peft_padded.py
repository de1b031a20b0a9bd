"""Hugging Face PEFT as its documentation shows it: a padded loop for each task, one task after the other.

The model's own loss over labels, the attention mask of the padding, AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from bench.peers.adapters import TaskAdamW, peft_models, set_adapter
from bench.rows import Batch, pad
from bench.sides import Setting


class PeftPadded:
    name = "peft"

    def __init__(self, base: Any, setting: Setting) -> None:
        self._models = peft_models(base, setting, "sdpa")
        self._optimizers = [TaskAdamW(model.parameters()) for model in self._models]

    def restore(self, adapters: Sequence[Mapping[str, Tensor]]) -> None:
        for model, tensors in zip(self._models, adapters, strict=True):
            set_adapter(model, tensors)

    def step(self, batch: Batch, learning_rate: float) -> list[float]:
        losses = []
        for model, optimizer, rows in zip(self._models, self._optimizers, batch.rows, strict=True):
            padded = pad(rows)
            loss = model(
                input_ids=padded.ids,
                attention_mask=padded.mask,
                labels=padded.unshifted_labels,
                use_cache=False,
            ).loss
            loss.backward()
            optimizer.step(learning_rate)
            losses.append(loss.item())
        return losses
