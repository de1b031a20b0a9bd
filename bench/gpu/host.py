"""What the host does for a microbatch before its first launch: tables of all tasks, on all groups of all layers.

On this machine's processor, with tensors that have addresses and no numbers; nothing is launched.
"""

from __future__ import annotations

from time import thread_time

import torch
from torch import Tensor

from bench.gpu.absent import GROUPS, RANK
from bench.gpu.shapes import SHAPES
from mlora_worker.lora.bound import BoundGroups, Placed, TaskPart, TaskProducts
from mlora_worker.lora.dropout import token_keys
from mlora_worker.lora.triton_products import TritonProducts

ROWS = (100, 150)  # of each task
DROPOUT = 0.05


def seconds(shape: str, tasks: int, repetitions: int) -> tuple[float, float]:
    """Of this thread: for the first microbatch of ``tasks`` tasks, which writes what never changes again, and the least for
    a later one.
    """
    loaded = [_task(shape) for _ in range(tasks)]
    products = TritonProducts()
    spent = [_microbatch(products, loaded, step) for step in range(1 + repetitions)]
    return spent[0], min(spent[1:])


def _microbatch(products: TritonProducts, loaded: list[TaskProducts], step: int) -> float:
    began, tokens = thread_time(), sum(ROWS)
    placed = [
        Placed(task, slice(n * tokens, (n + 1) * tokens), 0.01, token_keys(n, step, 0, ROWS))
        for n, task in enumerate(loaded)
    ]
    products.prepare(BoundGroups(1 + max(part.group for part in loaded[0].parts), placed))
    return thread_time() - began


def _task(shape: str) -> TaskProducts:
    own = SHAPES[shape]
    hidden, wide = own["hidden_size"], own["intermediate_size"]
    keys = own["num_key_value_heads"] * own["head_dim"]
    outputs = {"k_proj": keys, "v_proj": keys, "gate_proj": wide, "up_proj": wide}
    parts = []
    for layer in range(own["num_hidden_layers"]):
        for number, names in enumerate(GROUPS):
            inputs = wide if names == ("down_proj",) else hidden
            a, b = (
                _nothing(RANK * len(names), inputs),
                tuple(_nothing(outputs.get(n, hidden), RANK) for n in names),
            )
            parts.append(
                TaskPart(
                    group=layer * len(GROUPS) + number, rank=RANK, members=tuple(range(len(names))), a=a, b=b, grad_a=a,
                    grad_b=b, scale=2.0, mask_name=f"layers.{layer}.{names[0]}",
                )
            )  # fmt: skip
    return TaskProducts(tuple(parts), DROPOUT)


def _nothing(*shape: int) -> Tensor:
    return torch.zeros(1).expand(*shape)
