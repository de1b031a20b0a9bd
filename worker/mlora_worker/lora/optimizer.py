"""One task's AdamW on one stage. The stages' steps together are one step of the whole adapter: the update's
clip factor comes from the norm over all stages, and all else in AdamW works element by element.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import AdamW

from mlora_worker.lora.adapter import Adapter
from mlora_worker.lora.lasting import lasting_zeros
from mlora_worker.protocol import Optimizer, Training
from mlora_worker.stream.items import Update


class TaskOptimizer:
    """Weight decay is decoupled and applies to A and B alike, as in transformers' Trainer."""

    def __init__(self, adapter: Adapter, training: Training) -> None:
        self._adapter = adapter
        numbers = training.optimizer or Optimizer()
        self._adamw = AdamW(
            [adapter.parameters],
            lr=training.learning_rate,
            betas=numbers.betas,
            eps=numbers.denominator,
            weight_decay=training.weight_decay,
            # One pass over the memory. On a GPU it would want the count of steps there, and reading that waits.
            fused=adapter.gradient.device.type == "cpu",
        )
        # All that the task will hold is taken when it is loaded: an update in the midst of training cannot lack it.
        elements, device = adapter.gradient.numel(), adapter.gradient.device
        self.restore(0, lasting_zeros(elements, device), lasting_zeros(elements, device))

    def apply(self, update: Update) -> None:
        """Close a step: clip, AdamW, zero the gradients."""
        adapter = self._adapter
        if update.clip != 1.0:
            adapter.gradient.mul_(update.clip)
        adapter.parameters.grad = adapter.gradient
        self._adamw.param_groups[0]["lr"] = update.learning_rate
        self._adamw.step()
        adapter.gradient.zero_()
        adapter.refresh()

    @property
    def updates(self) -> int:
        """Steps made so far; the corrections of both moments depend on it."""
        return int(self._adamw.state[self._adapter.parameters]["step"])

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Running means of the gradients and of their squares, laid out as the parameters are; zeros before the first
        step."""
        state = self._adamw.state[self._adapter.parameters]
        return state["exp_avg"], state["exp_avg_sq"]

    def restore(self, updates: int, first: Tensor, second: Tensor) -> None:
        """Go on as after ``updates`` steps. The moments are laid out as the parameters are, and are taken over."""
        self._adamw.state[self._adapter.parameters] = {
            # In float32, as AdamW would make it, it would stay where it is from 2 ** 24 on.
            "step": torch.tensor(float(updates), dtype=torch.float64),
            "exp_avg": first,
            "exp_avg_sq": second,
        }

    @property
    def bytes(self) -> int:
        """Of the two moments."""
        return sum(moment.nbytes for moment in self.moments)
