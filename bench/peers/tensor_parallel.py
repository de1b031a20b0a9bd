"""Two or more ranks that cut every layer between them (tensor parallelism), one task after the other.

The usual cut: q, k, v, gate and up by their outputs, o and down by their inputs, so that a layer sums its hidden states
over the ranks twice forward and twice backward, and nothing else. PEFT's adapters sit on the parts. The head is whole on
each rank, and each takes its share of the supervised positions. The sums are torch's all-reduce. Tasks train one after
the other on one adapter: one for each would take the same time and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import inject_adapter_in_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from bench.base import transformers_model
from bench.peers.adapters import TaskAdamW, fill, lora_config
from bench.rows import pad
from bench.sides import MAX_GRAD_NORM, Setting
from mlora_worker.data.prepare import IGNORED, TokenRow

BY_OUTPUTS, BY_INPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


class TensorParallelTasks:
    """Raises ValueError where key heads cannot be dealt to the ranks."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)  # the same adapters and masks everywhere
        model = transformers_model(folder, torch.float32)
        if model.config.num_key_value_heads % self._world:
            raise ValueError(
                f"{model.config.num_key_value_heads} key heads cannot be dealt to {self._world} ranks"
            )
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                self._cut(part)
        self._head = model.get_output_embeddings().weight
        self._model = inject_adapter_in_model(lora_config(setting), model.model).train()
        for layer in self._model.layers:
            for part in (layer.self_attn, layer.mlp):
                part.register_forward_pre_hook(_enter, with_kwargs=True)
                for name in BY_INPUTS:
                    if hasattr(part, name):
                        getattr(part, name).register_forward_hook(lambda _, __, made: Summed.apply(made))
        adapter = [(name, one) for name, one in self._model.named_parameters() if one.requires_grad]
        self._whole = [one for name, one in adapter if _is_whole(name)]
        self._cut_up = [one for name, one in adapter if not _is_whole(name)]
        self._optimizer = TaskAdamW(self._model.parameters())

    def fill(self, value: float) -> None:
        fill(self._model, value)

    def step(self, kind: str, number: int, rows: Sequence[TokenRow], learning_rate: float) -> float:
        del kind, number
        supervised, total = sum(int((row.labels != IGNORED).sum()) for row in rows), torch.zeros(())
        for row in rows:
            loss = self._loss(row) / supervised
            torch.autograd.backward(loss)
            total += loss.detach()
        self._close(learning_rate)
        dist.all_reduce(total)
        return float(total)

    def _loss(self, row: TokenRow) -> Tensor:
        """This rank's part of the sum over the row."""
        padded = pad([row])
        hidden = Entered.apply(self._model(input_ids=padded.ids, use_cache=False).last_hidden_state)[0]
        own = (padded.targets[0] != IGNORED).nonzero().squeeze(1)[self._rank :: self._world]
        return cross_entropy(linear(hidden[own], self._head), padded.targets[0, own], reduction="sum")

    def _close(self, learning_rate: float) -> None:
        """Sum the gradients of what every rank has whole, clip to the norm over all ranks, and AdamW."""
        grads = [one.grad for one in self._whole if one.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
        squares = sum(
            (one.grad.square().sum() for one in self._cut_up if one.grad is not None), torch.zeros(())
        )
        dist.all_reduce(squares)
        norm = (squares + flat.square().sum()).sqrt()
        clip = min(1.0, MAX_GRAD_NORM / (float(norm) + 1e-6))
        for one in self._optimizer.parameters:
            if one.grad is not None:
                one.grad.mul_(clip)
        self._optimizer.update(learning_rate)

    def _cut(self, part: nn.Module) -> None:
        for names, dimension in ((BY_OUTPUTS, 0), (BY_INPUTS, 1)):
            for name in names:
                if hasattr(part, name):
                    module: Any = getattr(part, name)
                    own = module.weight.chunk(self._world, dimension)[self._rank].contiguous()
                    cut = nn.Linear(own.shape[1], own.shape[0], bias=False, device="meta")
                    cut.weight = nn.Parameter(own, requires_grad=False)
                    setattr(part, name, cut)


def _is_whole(name: str) -> bool:
    """A of what is cut by its outputs, B of what is cut by its inputs: each rank has a part of the gradient's sum."""
    return ("lora_A" in name) == any(one in name for one in BY_OUTPUTS)


def _enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The hidden states are a layer's part's first argument, by place or by name."""
    if args:
        return (Entered.apply(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": Entered.apply(kwargs["hidden_states"])}


class Entered(torch.autograd.Function):
    """Forward nothing; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        (grad,) = grads
        summed = grad.contiguous()
        dist.all_reduce(summed)
        return summed


class Summed(torch.autograd.Function):
    """Summed over the ranks forward; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        summed = x.contiguous().clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return grads[0]
