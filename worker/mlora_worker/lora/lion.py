"""Lion (Chen et al. 2023) on flat tensors: a step goes by the sign of a mean of gradients, so it keeps one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_PIECE = 2**20  # elements: what a step needs beside the moment is no larger, however large the adapter


@dataclass(frozen=True, slots=True)
class LionPart:
    """Parameters that learn at one rate; views, all laid out alike."""

    parameters: Tensor
    gradient: Tensor
    moment: Tensor
    ratio: float  # of its learning rate to the task's


@dataclass(frozen=True, slots=True)
class Lion:
    """``parameters <- parameters (1 - rate decay) - rate sign(beta1 moment + (1 - beta1) gradient)``, and then
    ``moment <- beta2 moment + (1 - beta2) gradient``."""

    beta1: float
    beta2: float
    weight_decay: float

    def step(self, parts: Sequence[LionPart], learning_rate: float) -> None:
        for part in parts:
            rate = learning_rate * part.ratio
            pieces = (torch.split(one, _PIECE) for one in (part.parameters, part.gradient, part.moment))
            for parameters, gradient, moment in zip(*pieces, strict=True):
                direction = (moment * self.beta1).add_(gradient, alpha=1 - self.beta1).sign_()
                parameters.mul_(1 - rate * self.weight_decay).add_(direction, alpha=-rate)
                moment.mul_(self.beta2).add_(gradient, alpha=1 - self.beta2)
