"""Hugging Face PEFT with a plain loop: what a task is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.vera import VeraLayer
from peft.utils.save_and_load import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import get_scheduler

from mlora_worker.lora.dropout import dropout_mask, token_keys
from mlora_worker.protocol import Training
from tests.equivalence.tasks import IGNORED, Base, Row, Task, Trained


class SameMask(torch.nn.Module):
    """Takes the place of PEFT's dropout on one module: our mask, on padded rows, multiplied by plain
    autograd.
    """

    def __init__(self, task: Task, path: str) -> None:
        super().__init__()
        self.task, self.path = task, path
        self.step, self.first_row = 0, 0
        self.lengths: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        keys = token_keys(self.task.training.seed, self.step, self.first_row, self.lengths, x.device)
        mask = dropout_mask(keys, self.path, x.shape[-1], self.task.lora.dropout)
        kept = (mask.bits(slice(None)) != 0).to(x.dtype) / (1 - self.task.lora.dropout)
        return x * torch.nn.utils.rnn.pad_sequence(
            list(torch.split(kept, list(self.lengths))), batch_first=True
        )


def _first_of_group(path: str) -> str:
    """Modules that share their input share its mask, which bears the name of the first (Llama's names)."""
    parent, _, name = path.rpartition(".")
    first = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
    return f"{parent}.{first.get(name, name)}"


def _targets(task: Task, start: Mapping[str, Tensor]) -> str | list[str]:
    """In PEFT's words. Of a model that also reads images, a word would have its towers, too: there, what is adapted is
    named one by one."""
    paths = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in start}
    if any("language_model." in path for path in paths):
        return sorted(paths)
    return "all-linear" if task.lora.target_modules == ("all-linear",) else list(task.lora.target_modules)


class PeftTask:
    """One task as Hugging Face PEFT has it: padded mini-batches, plain autograd, dropout by ``SameMask``."""

    def __init__(
        self,
        base: Base,
        task: Task,
        start: Mapping[str, Tensor],
        dtype: torch.dtype,
        config: PeftConfig | None = None,
    ) -> None:
        self.task = task
        config = config or LoraConfig(
            r=task.lora.rank,
            lora_alpha=task.lora.alpha,
            target_modules=_targets(task, start),
            use_dora=task.lora.use_dora,
            use_rslora=task.lora.use_rslora,
            task_type="CAUSAL_LM",
        )
        # Not in training mode: a base's own dropout, where it has any, stays off on both sides.
        self.model = get_peft_model(copy.deepcopy(base.model).to(dtype), config).eval()
        if dtype is torch.float64:
            self.model.double()  # the adapter, too
        set_peft_model_state_dict(self.model, dict(start))
        self._masks = []
        if task.lora.dropout:
            for name, module in self.model.named_modules():
                if isinstance(module, LoraLayer):
                    self._masks.append(
                        SameMask(task, _first_of_group(name.removeprefix("base_model.model.")))
                    )
                    module.lora_dropout["default"] = self._masks[-1]
                elif isinstance(module, VeraLayer):
                    self._masks.append(
                        SameMask(task, _first_of_group(name.removeprefix("base_model.model.")))
                    )
                    module.vera_dropout["default"] = self._masks[-1]
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def accumulate(self, step: int) -> float | None:
        """Forward and backward of a step's mini-batches. Returns the step's loss; None without supervised tokens."""
        if not self.task.supervised(step):
            return None
        supervised = self.task.weighted(step)
        size, rows = self.task.training.batch_size, self.task.batch(step)
        total = 0.0
        for first in range(0, len(rows), size):
            loss = self._loss_sum(step, first, rows[first : first + size]) / supervised
            torch.autograd.backward(loss)
            total += loss.item()
        return total

    def _loss_sum(self, step: int, first_row: int, rows: Sequence[Row]) -> Tensor:
        lengths = tuple(len(row.ids) for row in rows)
        for dropout in self._masks:
            dropout.step, dropout.first_row, dropout.lengths = step, first_row, lengths
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED)
        mask = torch.zeros_like(ids)
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            ids[i, :length], labels[i, :length] = torch.tensor(row.ids), torch.tensor(row.labels)
            mask[i, :length] = 1
        # In float64, as torch's own float32 cross entropy on the CPU is off by more than all the rest
        # together when the vocabulary is large (docs/contributors/numerics.md).
        logits = self.model(input_ids=ids, attention_mask=mask).logits.double()
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        weights = torch.tensor([row.weight for row in rows], dtype=torch.float64)
        return (losses.sum(dim=1) * weights).sum()

    def gradients(self) -> dict[str, Tensor]:
        """By the names in the adapter's file."""
        return {
            name.replace(".default", ""): parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }


def train_with_peft(
    base: Base,
    task: Task,
    start: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    config: PeftConfig | None = None,
    optimizer_of: Callable[[PeftModel, Training], torch.optim.Optimizer] | None = None,
) -> Trained:
    """The plain loop: accumulation, torch's own clipping and AdamW, transformers' schedulers. A step without
    supervised tokens is left out, but counts for the schedule. ``config``: another than the task's own words;
    ``optimizer_of``: in the place of AdamW.
    """
    peft, training = PeftTask(base, task, start, dtype, config), task.training
    if optimizer_of is not None:
        optimizer = optimizer_of(peft.model, training)
    else:
        optimizer = torch.optim.AdamW(
            peft.parameters, lr=training.learning_rate, weight_decay=training.weight_decay
        )
    scheduler = get_scheduler(training.schedule.value, optimizer, training.warmup_steps, task.steps)
    result = Trained(start=dict(start))
    for step in range(1, task.steps + 1):
        result.losses.append(peft.accumulate(step))
        if result.losses[-1] is not None:
            if training.max_grad_norm:
                norm = torch.nn.utils.clip_grad_norm_(peft.parameters, training.max_grad_norm)
                result.norms.append(norm.item())
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    result.adapter = get_peft_model_state_dict(peft.model)
    return result
