"""One PEFT model for each task on shared weights, and a task's optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils.save_and_load import set_peft_model_state_dict
from torch import Tensor, nn

from bench.base import sharing_copy
from bench.sides import LEARNING_RATE, MAX_GRAD_NORM, Setting


def lora_config(setting: Setting) -> LoraConfig:
    alone = setting.targets == ("all-linear",)
    return LoraConfig(
        r=setting.rank,
        lora_alpha=setting.alpha,
        lora_dropout=setting.dropout,
        target_modules="all-linear" if alone else list(setting.targets),
        task_type="CAUSAL_LM",
    )


def peft_models(base: Any, setting: Setting, attention: str) -> list[Any]:
    """One for each task. PEFT changes the modules that it is given, so each has its own; weights are shared."""
    return [peft_model(sharing_copy(base, attention), setting) for _ in range(setting.tasks)]


def peft_model(own: Any, setting: Setting) -> Any:
    """On a model that nobody else changes."""
    return get_peft_model(own, lora_config(setting)).train()


@torch.no_grad()
def fill(module: nn.Module, value: float) -> None:
    """Every A of an adapter: so that modules that hold other parts of it begin alike."""
    for name, parameter in module.named_parameters():
        if "lora_A" in name:
            parameter.fill_(value)


def set_adapter(model: Any, tensors: Mapping[str, Tensor]) -> None:
    left = set_peft_model_state_dict(model, dict(tensors)).unexpected_keys
    if left:
        raise ValueError(f"the adapter has tensors that PEFT does not know: {left[:3]}")


class PeftTasks:
    """One PEFT model and one optimizer a task; those who train them say how a step goes."""

    def __init__(self, base: Any, setting: Setting, attention: str) -> None:
        self.models = peft_models(base, setting, attention)
        self.optimizers = [TaskAdamW(model.parameters()) for model in self.models]

    def restore(self, adapters: Sequence[Mapping[str, Tensor]]) -> None:
        for model, tensors in zip(self.models, adapters, strict=True):
            set_adapter(model, tensors)


class TaskAdamW:
    """Clipping to norm 1 and AdamW, as transformers' Trainer has them by default."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._adamw = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(self, learning_rate: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.update(learning_rate)

    def update(self, learning_rate: float) -> None:
        """Without clipping."""
        self._adamw.param_groups[0]["lr"] = learning_rate
        self._adamw.step()
        self._adamw.zero_grad()
