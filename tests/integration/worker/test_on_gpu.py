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
from tests.fixtures.model_options import FAMILY
from tests.fixtures.stage_steps import BIG, engine_of, microbatch, train

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not CUDA and "MLORA_TEST_DRY_RUN" not in os.environ, reason="needs a GPU"),
]
CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "llama": BIG,
    "qwen3_5": FAMILY["qwen3_5"] | {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("dtype", "limit", "limit_updated"), [(torch.float32, 1e-3, 1e-2), (torch.bfloat16, 0.1, 0.5)], ids=str
)
def test_a_stage_trains_as_it_does_on_the_cpu(
    small_model: Callable[..., Any], kind: str, dtype: torch.dtype, limit: float, limit_updated: float
) -> None:
    saved = small_model(kind, **MODELS[kind])
    # Adam's first update has the gradient's sign alone: where that is nothing but rounding, it is anything.
    losses, adapters = train(engine_of(saved, DEVICE, dtype), 2)
    expected_losses, expected = train(engine_of(saved, CPU, dtype), 2)
    for found, wanted in zip(losses, expected_losses, strict=True):
        torch.testing.assert_close(found, wanted, rtol=limit, atol=0)
    for task, tensors in adapters.items():
        for name, tensor in tensors.items():
            assert torch.isfinite(tensor).all()
            assert (tensor - expected[task][name]).norm() <= limit_updated * expected[task][name].norm(), name


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


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("llama", torch.float32), ("llama", torch.bfloat16), ("qwen3_5", torch.bfloat16)],
    ids=str,
)
def test_in_the_steady_state_nothing_waits_for_the_device(
    small_model: Callable[..., Any], kind: str, dtype: torch.dtype
) -> None:
    engine = engine_of(small_model(kind, **MODELS[kind]), DEVICE, dtype)
    if CUDA and engine.stage.recurrence in ("torch", "Triton"):
        pytest.skip("rows go one by one: flash-linear-attention was not taken")
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
