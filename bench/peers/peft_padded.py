"""Hugging Face PEFT as its documentation shows it: a padded loop for each task, one task after the other.

The model's own loss over labels, the attention mask of the padding, AdamW.
"""

from __future__ import annotations

from typing import Any

from bench.peers.adapters import PeftTasks
from bench.rows import Batch, pad
from bench.sides import Setting


class PeftPadded(PeftTasks):
    name = "peft"

    def __init__(self, base: Any, setting: Setting) -> None:
        super().__init__(base, setting, "sdpa")

    def step(self, batch: Batch, learning_rate: float) -> list[float]:
        losses = []
        for model, optimizer, rows in zip(self.models, self.optimizers, batch.rows, strict=True):
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
