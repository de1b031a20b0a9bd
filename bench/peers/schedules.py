"""GPipe and 1F1B of torch.distributed.pipelining, one task after the other; ``bench/peers/schedule_rank.py`` runs it.

One module for each task on the weights of this rank's stage, adapted by PEFT. A step of a task is cut into microbatches
of equal shape, padded to the longest row of the step: the schedules send buffers of one shape. Causal attention makes a
mask needless, as rows are padded on the right. The loss looks at supervised positions only, as this project's does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from peft import inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

from bench.peers.adapters import TaskAdamW, fill, lora_config
from bench.rows import pad
from bench.sides import MAX_GRAD_NORM, Setting
from mlora_worker.data.prepare import IGNORED, TokenRow

KINDS: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class StageModule(nn.Module):
    """Embedding where first, decoder layers, final norm where last, of a transformers model of the Llama family."""

    def __init__(self, model: Any, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = model.model.embed_tokens if first else None
        self.layers = nn.ModuleList(model.model.layers[index] for index in layers)
        self.rotary = model.model.rotary_emb
        self.norm = model.model.norm if last else None

    def forward(self, x: Tensor) -> Tensor:
        """[rows, longest] token ids or [rows, longest, size] -> [rows, longest, size]."""
        hidden: Tensor = x if self.embedding is None else self.embedding(x)
        positions = torch.arange(hidden.shape[1])[None]
        embeddings = self.rotary(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(
                hidden, attention_mask=None, position_ids=positions, position_embeddings=embeddings
            )
        return hidden if self.norm is None else self.norm(hidden)


@dataclass
class _Task:
    module: nn.Module
    optimizer: TaskAdamW


class ScheduledTasks:
    """One rank of ``world``; all ranks call the same methods in the same order. ``model``: the whole one, frozen."""

    def __init__(
        self, model: Any, setting: Setting, layers: Sequence[range], rank: int, microbatches: int
    ) -> None:
        self._rank, self._world, self._microbatches = rank, len(layers), microbatches
        self._size, self._dtype = int(model.config.hidden_size), model.dtype
        self._head = model.get_output_embeddings().weight
        self._first_layer = layers[rank].start
        stage = StageModule(
            model, layers[rank], first=rank == 0, last=rank == self._world - 1
        ).requires_grad_(False)
        shared = {id(tensor): tensor for tensor in (*stage.parameters(), *stage.buffers())}
        self._tasks = []
        for _ in range(setting.tasks):
            module = inject_adapter_in_model(lora_config(setting), copy.deepcopy(stage, dict(shared))).train()
            self._tasks.append(_Task(module, TaskAdamW(module.parameters())))

    @torch.no_grad()
    def restore(self, adapters: Sequence[Mapping[str, Tensor]]) -> None:
        """``adapters[t]``: the whole adapter of task t, by PEFT's names; those of other ranks are passed over."""
        for task, tensors in zip(self._tasks, adapters, strict=True):
            for name, parameter in task.module.named_parameters():
                if parameter.requires_grad:
                    _, index, rest = name.split(".", 2)
                    path = f"layers.{int(index) + self._first_layer}.{rest.replace('.default.', '.')}"
                    parameter.copy_(tensors[f"base_model.model.model.{path}"])

    def fill(self, value: float) -> None:
        for task in self._tasks:
            fill(task.module, value)

    def step(self, kind: str, number: int, rows: Sequence[TokenRow], learning_rate: float) -> float:
        """One optimizer step of task ``number``; its loss on the last rank, 0 on the others."""
        task, padded = self._tasks[number], pad(rows)
        supervised = int((padded.targets != IGNORED).sum())

        def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
            """Of one microbatch: a sum, divided by the whole step's count."""
            chosen = targets != IGNORED
            logits = nn.functional.linear(hidden[chosen], self._head)
            return cross_entropy(logits.float(), targets[chosen], reduction="sum") / supervised

        last = self._rank == self._world - 1
        schedule = KINDS[kind](
            self._stage(task.module, padded.ids), self._microbatches, loss_fn=loss_of, scale_grads=False
        )
        losses: list[Tensor] = []
        inputs = (padded.ids,) if self._rank == 0 else ()
        schedule.step(
            *inputs,
            target=padded.targets if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        self._close(task, learning_rate)
        return float(sum(loss.item() for loss in losses))

    def _stage(self, module: nn.Module, ids: Tensor) -> PipelineStage:
        """Made anew for each step, as the rows' length is new; the shapes are given, so nothing has to be asked."""
        rows, longest = len(ids) // self._microbatches, ids.shape[1]
        hidden = torch.empty(rows, longest, self._size, dtype=self._dtype, device="meta")
        first, last = self._rank == 0, self._rank == self._world - 1
        return PipelineStage(
            module,
            self._rank,
            self._world,
            torch.device("cpu"),
            input_args=torch.empty(rows, longest, dtype=torch.int64, device="meta")
            if first
            else hidden.requires_grad_(),
            output_args=hidden.detach().requires_grad_(),
            input_grads=None if first else hidden.detach(),
            output_grads=None if last else hidden.detach(),
        )

    def _close(self, task: _Task, learning_rate: float) -> None:
        """Clip to the norm over all ranks, and AdamW."""
        squares = torch.stack(
            [p.grad.square().sum() for p in task.optimizer.parameters if p.grad is not None]
        ).sum()
        dist.all_reduce(squares)
        clip = min(1.0, MAX_GRAD_NORM / (squares.sqrt().item() + 1e-6))
        for parameter in task.optimizer.parameters:
            if clip < 1 and parameter.grad is not None:
                parameter.grad.mul_(clip)
        task.optimizer.update(learning_rate)
