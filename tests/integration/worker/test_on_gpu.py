"""A stage on a GPU beside the same one on the CPU; attention of packed rows there; nothing waits for the device.

Skipped without a GPU. ``bench/gpu.sh`` runs them where there is one, and as a dry run on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlora_worker.model.attention import PackedRows, packed_attention
from mlora_worker.model.load import load_stage
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.protocol import LoRAConfig, Training
from mlora_worker.stream.items import Load, Segment, Train, Update

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not CUDA and "MLORA_TEST_DRY_RUN" not in os.environ, reason="needs a GPU"),
]

TASKS = {
    "a": LoRAConfig(rank=4, alpha=8, dropout=0.2, target_modules=("q_proj", "v_proj")),
    "b": LoRAConfig(rank=16, alpha=16, target_modules=("all-linear",)),
    "c": LoRAConfig(rank=3, alpha=3, dropout=0.1, target_modules=("o_proj", "down_proj")),
}
LENGTHS = {"a": (9, 17), "b": (33,), "c": (1, 5, 12)}
BIG = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def engine_of(saved: Any, device: torch.device, dtype: torch.dtype) -> StageEngine:
    engine = StageEngine(load_stage(saved.folder, saved, 0, 1, dtype, device))
    for seed, (task, lora) in enumerate(TASKS.items()):
        engine.load(Load(number=0, task=task, lora=lora, training=Training(seed=seed)))
    return engine


def microbatch(step: int) -> tuple[Train, Tensor, Tensor]:
    segments = tuple(
        Segment(
            task=task, step=step, lengths=LENGTHS[task], first_row=0, weight=1 / sum(LENGTHS[task]), closes_step=True,
            update=Update(step=step - 1, learning_rate=1e-3, clip=0.5) if step > 1 else None,
        )
        for task in TASKS
    )  # fmt: skip
    item = Train(number=step, segments=segments)
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 97, (item.tokens,), generator=generator)
    labels = ids.roll(-1)
    labels[::5] = -100
    return item, ids, labels


def train(engine: StageEngine, steps: int) -> tuple[list[Tensor], dict[str, dict[str, Tensor]]]:
    losses = []
    for step in range(1, steps + 1):
        item, ids, labels = microbatch(step)
        out = engine.forward(item, token_ids=ids, hidden=None, labels=labels)
        back = engine.backward(item.number, None)
        assert out.losses is not None
        losses += [out.losses.cpu(), back.squared_norms.cpu()]
    return losses, {task: engine.export(task) for task in TASKS}


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)], ids=str)
def test_a_stage_trains_as_it_does_on_the_cpu(
    small_model: Callable[..., Any], dtype: torch.dtype, limit: float
) -> None:
    saved = small_model("llama", **BIG)
    # After the update of the first step Adam has made rounding errors of tiny gradients large: two steps tell enough.
    losses, adapters = train(engine_of(saved, DEVICE, dtype), 2)
    expected_losses, expected = train(engine_of(saved, CPU, dtype), 2)
    for found, wanted in zip(losses, expected_losses, strict=True):
        torch.testing.assert_close(found, wanted, rtol=limit, atol=0)
    for task, tensors in adapters.items():
        for name, tensor in tensors.items():
            assert torch.isfinite(tensor).all()
            assert (tensor - expected[task][name]).norm() <= 10 * limit * expected[task][name].norm(), name


def test_two_runs_of_a_stage_are_the_same(small_model: Callable[..., Any]) -> None:
    saved = small_model("llama", **BIG)
    one, other = (train(engine_of(saved, DEVICE, torch.float32), 2)[1] for _ in range(2))
    for task, tensors in one.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other[task][name]), name


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    if not CUDA:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_the_steady_state_nothing_waits_for_the_device(
    small_model: Callable[..., Any], dtype: torch.dtype
) -> None:
    engine = engine_of(small_model("llama", **BIG), DEVICE, dtype)
    train(engine, 2)  # kernels are compiled, and AdamW has its state
    with waiting_is_an_error():
        item, ids, labels = microbatch(3)
        engine.forward(item, token_ids=ids, hidden=None, labels=labels)
        engine.backward(item.number, None)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_packed_attention_equals_that_of_the_cpu(heads: tuple[int, int], window: int | None) -> None:
    lengths, size = (1, 40, 130, 9), 64
    generator = torch.Generator().manual_seed(0)
    own = [
        torch.randn(1, n, sum(lengths), size, generator=generator).bfloat16()
        for n in (heads[0], heads[1], heads[1])
    ]
    upstream = torch.randn(1, sum(lengths), heads[0], size, generator=generator).bfloat16()

    def attend(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in own]
        out, _ = packed_attention(
            nn.Module(),
            *inputs,
            None,
            packed=PackedRows(lengths, device),
            scaling=0.125,
            sliding_window=window,
        )
        grads = torch.autograd.grad(out, inputs, upstream.to(device, dtype))
        return [tensor.detach().double().cpu() for tensor in (out, *grads)]

    for found, wanted in zip(attend(DEVICE, torch.bfloat16), attend(CPU, torch.float32), strict=True):
        assert (found - wanted).norm() < 0.01 * wanted.norm()
