"""Two or more ranks that share the weights in shards (FSDP2 of torch), each with rows of its own, one task after the other.

Each decoder layer is gathered before its forward and again before its backward, as torch does by default. PEFT's adapter is
sharded with it. Rows are dealt to the ranks and run one by one: no padding, no mask. Tasks train one after the other, so
one model with one adapter does for all: an adapter per task would take the same time and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from peft import inject_adapter_in_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from bench.base import transformers_model
from bench.peers.adapters import TaskAdamW, fill, lora_config
from bench.rows import pad
from bench.sides import Setting
from mlora_worker.data.prepare import IGNORED, TokenRow


class ShardedTasks:
    def __init__(self, folder: Path, setting: Setting) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (self._world,))
        model = transformers_model(folder, torch.float32)
        self._model = inject_adapter_in_model(lora_config(setting), model).train()
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = TaskAdamW(self._model.parameters())

    def fill(self, value: float) -> None:
        fill(self._model, value)

    def step(self, kind: str, number: int, rows: Sequence[TokenRow], learning_rate: float) -> float:
        """Raises ValueError where the ranks do not get equally many rows: each would wait for gathers of the others."""
        del kind, number
        if len(rows) % self._world:
            raise ValueError(f"{len(rows)} rows cannot be dealt to {self._world} ranks")
        supervised = sum(int((row.labels != IGNORED).sum()) for row in rows)
        own, total = rows[self._rank :: self._world], torch.zeros(())
        for place, row in enumerate(own):
            self._model.set_requires_gradient_sync(place == len(own) - 1)
            loss = self._loss(row) / supervised
            torch.autograd.backward(loss * self._world)  # gradients are averaged over the ranks
            total += loss.detach()
        self._optimizer.step(learning_rate)
        dist.all_reduce(total)
        return float(total)

    def _loss(self, row: TokenRow) -> torch.Tensor:
        """Sum over the row; logits of supervised positions only, which are a product of the model's own forward."""
        padded = pad([row])
        kept = (padded.targets[0] != IGNORED).nonzero().squeeze(1)
        logits = self._model(input_ids=padded.ids, use_cache=False, logits_to_keep=kept).logits[0]
        return cross_entropy(logits.float(), padded.targets[0, kept], reduction="sum")
