"""One task's optimizer on one stage. The stages' steps together are one step of the whole adapter: the update's
clip factor comes from the norm over all stages, and all else works element by element.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from mlora_worker.lora.lasting import lasting_zeros
from mlora_worker.lora.lion import Lion, LionPart
from mlora_worker.lora.vera import AnyAdapter
from mlora_worker.protocol import Optimizer, OptimizerType, Training
from mlora_worker.stream.items import Update


class _Rule(Protocol):
    """Of an update; holds moments, laid out as the parameters are."""

    @property
    def updates(self) -> int: ...

    @property
    def moments(self) -> tuple[Tensor, ...]: ...

    def step(self, learning_rate: float) -> None: ...

    def restore(self, updates: int, moments: tuple[Tensor, ...]) -> None: ...


class TaskOptimizer:
    """Weight decay is decoupled and applies to all parameters alike, as in transformers' Trainer. ``ratio``: of the
    learning rate of B to that of A (LoRA+), else both learn at the same."""

    def __init__(self, adapter: AnyAdapter, training: Training, ratio: float | None = None) -> None:
        self._adapter = adapter
        numbers = training.optimizer or Optimizer()
        parts = [(slice(0, adapter.inward), 1.0), (slice(adapter.inward, None), ratio)] if ratio else []
        self._rule: _Rule = _RULES[numbers.type](adapter, training, numbers, parts or [(slice(None), 1.0)])
        # All that the task will hold is taken when it is loaded: an update in the midst of training cannot lack it.
        elements, device = adapter.gradient.numel(), adapter.gradient.device
        self.restore(0, *(lasting_zeros(elements, device) for _ in range(numbers.moments)))

    def apply(self, update: Update) -> None:
        """Close a step: clip, let the parameters follow, zero the gradients."""
        adapter = self._adapter
        if update.clip != 1.0:
            adapter.gradient.mul_(update.clip)
        self._rule.step(update.learning_rate)
        adapter.forget_gradients()
        adapter.refresh()

    @property
    def updates(self) -> int:
        """Steps made so far."""
        return self._rule.updates

    @property
    def moments(self) -> tuple[Tensor, ...]:
        """Running means of the gradients and, with AdamW, of their squares, laid out as the parameters are; zeros before
        the first step."""
        return self._rule.moments

    def restore(self, updates: int, *moments: Tensor) -> None:
        """Go on as after ``updates`` steps. The moments are laid out as the parameters are, and are taken over."""
        self._rule.restore(updates, moments)

    @property
    def bytes(self) -> int:
        """Of the moments."""
        return sum(moment.nbytes for moment in self.moments)


_Parts = list[tuple[slice, float]]  # of the parameters, with the ratio of their learning rate to the task's


class _AdamWRule:
    """torch's own. The corrections of both moments depend on the count of steps."""

    def __init__(self, adapter: AnyAdapter, training: Training, numbers: Optimizer, parts: _Parts) -> None:
        flat = adapter.parameters
        self._parts = [
            (flat if len(parts) == 1 else nn.Parameter(flat.detach()[own]), adapter.gradient[own], own, ratio)
            for own, ratio in parts
        ]
        self._moments: tuple[Tensor, ...] = ()
        self._adamw = AdamW(
            [{"params": [one]} for one, *_ in self._parts],
            lr=training.learning_rate,
            betas=numbers.betas,
            eps=numbers.denominator,
            weight_decay=training.weight_decay,
            # One pass over the memory. On a GPU it would want the count of steps there, and reading that waits.
            fused=adapter.gradient.device.type == "cpu",
        )

    @property
    def updates(self) -> int:
        return int(self._adamw.state[self._parts[0][0]]["step"])

    @property
    def moments(self) -> tuple[Tensor, ...]:
        return self._moments

    def step(self, learning_rate: float) -> None:
        for (part, gradient, _, ratio), group in zip(self._parts, self._adamw.param_groups, strict=True):
            part.grad = gradient
            group["lr"] = learning_rate * ratio
        self._adamw.step()

    def restore(self, updates: int, moments: tuple[Tensor, ...]) -> None:
        self._moments = moments
        first, second = moments
        for part, _, own, _ in self._parts:
            self._adamw.state[part] = {
                # In float32, as AdamW would make it, it would stay where it is from 2 ** 24 on.
                "step": torch.tensor(float(updates), dtype=torch.float64),
                "exp_avg": first[own],
                "exp_avg_sq": second[own],
            }


class _LionRule:
    def __init__(self, adapter: AnyAdapter, training: Training, numbers: Optimizer, parts: _Parts) -> None:
        self._lion = Lion(*numbers.betas, training.weight_decay)
        self._parameters, self._gradient = adapter.parameters.detach(), adapter.gradient
        self._cuts = parts
        self._parts: list[LionPart] = []
        self._moments: tuple[Tensor, ...] = ()
        self._updates = 0

    @property
    def updates(self) -> int:
        return self._updates

    @property
    def moments(self) -> tuple[Tensor, ...]:
        return self._moments

    def step(self, learning_rate: float) -> None:
        self._lion.step(self._parts, learning_rate)
        self._updates += 1

    def restore(self, updates: int, moments: tuple[Tensor, ...]) -> None:
        self._updates, self._moments = updates, moments
        (moment,) = moments
        self._parts = [
            LionPart(self._parameters[own], self._gradient[own], moment[own], ratio)
            for own, ratio in self._cuts
        ]


_RULES: dict[OptimizerType, type[_AdamWRule | _LionRule]] = {
    OptimizerType.ADAMW: _AdamWRule,
    OptimizerType.LION: _LionRule,
}
