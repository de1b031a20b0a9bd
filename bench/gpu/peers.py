"""PEFT on a GPU, a step of each task after the other: padded as its documentation shows it, and packed as TRL does.

Both run the same models, so that eight adapters have to be made once only. The packed one is given what it needs to be
fast: torch's variable-length flash attention, and logits of supervised tokens only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.peers.adapters import TaskAdamW, peft_models
from bench.rows import Batch, pack, pad
from bench.sides import Setting
from mlora_worker.data.prepare import IGNORED
from mlora_worker.model.attention import PACKED_ATTENTION, PackedRows
from mlora_worker.model.transfer import to_device


class PeftTasks:
    """One PEFT model and one optimizer for each task, on shared weights."""

    def __init__(self, model: Any, setting: Setting) -> None:
        self.models = peft_models(model, setting, "sdpa")
        self.optimizers = [TaskAdamW(made.parameters()) for made in self.models]
        self.device: torch.device = model.device


class PeftPaddedOnDevice:
    name = "peft"

    def __init__(self, tasks: PeftTasks) -> None:
        self._tasks = tasks

    def step(self, batch: Batch, learning_rate: float) -> list[float]:
        losses: list[Tensor] = []
        for model, optimizer, rows in zip(
            self._tasks.models, self._tasks.optimizers, batch.rows, strict=True
        ):
            model.get_base_model().config._attn_implementation = "sdpa"
            padded = pad(rows, multiple=8)
            device = self._tasks.device
            loss = model(
                input_ids=to_device(padded.ids, device),
                attention_mask=to_device(padded.mask, device),
                labels=to_device(padded.unshifted_labels, device),
                use_cache=False,
            ).loss
            loss.backward()
            optimizer.step(learning_rate)
            losses.append(loss.detach())
        return [float(loss) for loss in losses]


class PeftPackedOnDevice:
    name = "packed"

    def __init__(self, tasks: PeftTasks) -> None:
        self._tasks = tasks

    def step(self, batch: Batch, learning_rate: float) -> list[float]:
        losses: list[Tensor] = []
        device = self._tasks.device
        for model, optimizer, rows in zip(
            self._tasks.models, self._tasks.optimizers, batch.rows, strict=True
        ):
            causal = model.get_base_model()
            causal.config._attn_implementation = PACKED_ATTENTION
            packed = pack(rows)
            supervised = (packed.targets != IGNORED).nonzero().squeeze(1)
            hidden = causal.model(
                input_ids=to_device(packed.ids[None], device),
                position_ids=to_device(packed.positions[None], device),
                packed=PackedRows(packed.lengths, device),
                use_cache=False,
            ).last_hidden_state[0]
            logits = causal.lm_head(hidden[to_device(supervised, device)])
            loss = cross_entropy(logits.float(), to_device(packed.targets[supervised], device))
            torch.autograd.backward(loss)
            optimizer.step(learning_rate)
            losses.append(loss.detach())
        return [float(loss) for loss in losses]
