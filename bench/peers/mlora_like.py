"""Padded batching as mLoRA's public code does it: the rows of all tasks in one rectangle, as long as the longest row of
all, rounded up to a multiple of 8.

Low-rank products are computed in float32 on each task's part of the batch and put together again, attention with a
mask over the rectangle and an explicit softmax, logits and loss for every position of the rectangle. Labels are those
of the other sides, so that the losses can be compared; mLoRA itself also learns prompts and padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, linear

from bench.base import sharing_copy
from bench.peers.adapters import TaskAdamW
from bench.rows import Batch, pad
from bench.sides import Setting
from mlora_worker.data.prepare import IGNORED
from mlora_worker.lora.adapter import peft_keys

ALIGNMENT = 8


class PartitionedLinear(nn.Module):
    """A frozen linear with one adapter for each part of the batch; ``sizes``: rows of each part, set before a forward."""

    def __init__(self, base: nn.Linear, setting: Setting) -> None:
        super().__init__()
        self.base = base
        self.sizes: list[int] = []
        self._dropout, self._scale = setting.dropout, setting.alpha / setting.rank
        self.a = nn.ParameterList(
            nn.Parameter(torch.empty(setting.rank, base.in_features)) for _ in range(setting.tasks)
        )
        self.b = nn.ParameterList(
            nn.Parameter(torch.zeros(base.out_features, setting.rank)) for _ in range(setting.tasks)
        )
        for a in self.a:
            nn.init.kaiming_uniform_(a, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, longest, in] -> [rows, longest, out]."""
        y: Tensor = self.base(x)
        parts = [
            linear(linear(dropout(part, self._dropout, self.training), a), b) * self._scale
            for part, a, b in zip(torch.split(x.float(), self.sizes), self.a, self.b, strict=True)
        ]
        return y + torch.cat(parts).to(y.dtype)


class MLoRALike:
    name = "mlora"

    def __init__(self, base: Any, setting: Setting) -> None:
        self._model = sharing_copy(base, "eager")
        self._linears = dict(_partition(self._model, setting))
        self._optimizers = [
            TaskAdamW(
                [m.a[task] for m in self._linears.values()] + [m.b[task] for m in self._linears.values()]
            )
            for task in range(setting.tasks)
        ]

    @torch.no_grad()
    def restore(self, adapters: Sequence[Mapping[str, Tensor]]) -> None:
        for task, tensors in enumerate(adapters):
            for path, module in self._linears.items():
                name_a, name_b = peft_keys(path)
                module.a[task].copy_(tensors[name_a])
                module.b[task].copy_(tensors[name_b])

    def step(self, batch: Batch, learning_rate: float) -> list[float]:
        sizes = [len(rows) for rows in batch.rows]
        for module in self._linears.values():
            module.sizes = sizes
        padded = pad([row for rows in batch.rows for row in rows], ALIGNMENT)
        logits = self._model(input_ids=padded.ids, attention_mask=padded.mask, use_cache=False).logits
        losses = []
        for stop, size in zip(accumulate(sizes), sizes, strict=True):
            own = slice(stop - size, stop)
            losses.append(
                cross_entropy(
                    logits[own].flatten(0, 1).float(), padded.targets[own].flatten(), ignore_index=IGNORED
                )
            )
        torch.autograd.backward(torch.stack(losses).sum())
        for optimizer in self._optimizers:
            optimizer.step(learning_rate)
        return [loss.item() for loss in losses]


def _partition(model: Any, setting: Setting) -> Iterator[tuple[str, PartitionedLinear]]:
    """Wrap the targeted linear modules of the decoder layers; gives each with its path."""
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and path.startswith("model.layers.")
        and (setting.targets == ("all-linear",) or path.rpartition(".")[2] in setting.targets)
    ]
    for path, module in found:
        parent, _, name = path.rpartition(".")
        wrapped = PartitionedLinear(module, setting)
        setattr(model.get_submodule(parent), name, wrapped)
        yield path, wrapped
