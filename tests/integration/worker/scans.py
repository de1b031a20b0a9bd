"""The scans of flash-linear-attention beside transformers' in torch, on a GPU with ``MLORA_TEST_DEVICE=cuda``, else in
Triton's interpreter: ``test_flash_linear_attention`` runs this file in a process of its own, where all is interpreted."""

from __future__ import annotations

import builtins
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlora_worker.model.attention import PackedRows
from mlora_worker.model.load import load_stage
from mlora_worker.model.recurrent import choice
from mlora_worker.model.recurrent.flash_linear_attention import FlashLinearAttention
from mlora_worker.model.recurrent.looking_back import Kernels, LookingBack
from mlora_worker.runtime.kernel_compiler import launch
from tests.fixtures.model_options import FAMILY
from tests.fixtures.small_models import Saved

DEVICE = torch.device(os.environ.get("MLORA_TEST_DEVICE", "cpu"))
TYPES = pytest.mark.parametrize("kind", ["qwen3_5", "granitemoehybrid"])
LENGTHS = (1, 70, 2)
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-2}
if DEVICE.type == "cuda":  # where float32 is multiplied in tf32; the interpreter multiplies no bfloat16
    LIMITS |= {torch.float32: 1e-2, torch.bfloat16: 4e-2}
try:
    library = FlashLinearAttention()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)
if DEVICE.type == "cpu":
    from triton.runtime.interpreter import _implicit_cvt

    def counted(*ends: Any) -> Iterator[Any]:
        """The interpreter counts loops in numbers of Python, which have no types; two kernels ask for one."""
        return (_implicit_cvt(i) for i in builtins.range(*map(int, ends)))

    for name in ("chunk_delta_h", "chunk_h"):
        vars(importlib.import_module(f"fla.ops.common.{name}"))["range"] = counted
KERNELS = Kernels(delta_rule=library.delta_rule, scan=library.scan)


@pytest.fixture
def layer(small_model: Callable[..., Saved]) -> Callable[[str, torch.dtype], LookingBack]:
    def make(kind: str, dtype: torch.dtype) -> LookingBack:
        saved = small_model(kind, **FAMILY[kind])
        stage = load_stage(saved.folder, saved, 0, 1, dtype, DEVICE)
        return next(one for one in stage.layers.modules() if isinstance(one, LookingBack))

    return make


def drawn(layer: LookingBack, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    tokens = sum(LENGTHS)
    return tuple(
        torch.randn(1, tokens, width, generator=generator).to(DEVICE, dtype) for width in layer.widths()
    )


def results(
    layer: LookingBack, kernels: Kernels, parts: tuple[Tensor, ...], lengths: tuple[int, ...]
) -> list[Tensor]:
    """What was looked back at, and the gradients of the parts."""
    layer.kernels = kernels
    leaves = [one.clone().requires_grad_() for one in parts]
    y = layer.looked(leaves, PackedRows(lengths, DEVICE))
    upstream = torch.cos(torch.arange(y[0, 0].numel(), dtype=torch.float32)).to(DEVICE, y.dtype)
    y.backward(upstream.view_as(y[:1, :1]).expand_as(y))
    return [y.detach(), *(one.grad for one in leaves if one.grad is not None)]


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next", "granitemoehybrid", "falcon_h1"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_outputs_and_gradients_equal_those_of_rows_one_by_one(
    kind: str, dtype: torch.dtype, layer: Callable[[str, torch.dtype], LookingBack]
) -> None:
    one = layer(kind, dtype)
    parts = drawn(one, dtype)
    found, wanted = (results(one, kernels, parts, LENGTHS) for kernels in (KERNELS, Kernels()))
    assert len(found) == len(wanted) == 1 + len(parts)
    for own, right in zip(found, wanted, strict=True):
        assert (own.double() - right.double()).norm() <= LIMITS[dtype] * right.double().norm()


@TYPES
def test_a_row_has_the_same_bits_beside_any_neighbours(
    kind: str, layer: Callable[[str, torch.dtype], LookingBack]
) -> None:
    """70 tokens are two chunks; before them lie 1, so that chunks of the whole would be cut elsewhere."""
    one = layer(kind, torch.float32)
    parts = drawn(one, torch.float32)
    together = results(one, KERNELS, parts, LENGTHS)
    start = 0
    for length in LENGTHS:
        own = slice(start, start + length)
        alone = results(one, KERNELS, tuple(part[:, own] for part in parts), (length,))
        assert all(torch.equal(mine, all_[:, own]) for mine, all_ in zip(alone, together, strict=True))
        start += length


@TYPES
def test_the_library_is_taken(
    kind: str, layer: Callable[[str, torch.dtype], LookingBack], caplog: pytest.LogCaptureFixture
) -> None:
    one = layer(kind, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)
    with caplog.at_level(logging.WARNING):
        assert choice.take_kernels(nn.ModuleList([one]), lambda: library, launch) == library.name
    assert not caplog.records


def test_every_tuned_kernel_has_one_configuration() -> None:
    from triton.runtime.autotuner import Autotuner

    tuned = {
        id(kernel): kernel
        for name, module in list(sys.modules.items())
        if name.startswith("fla.ops.")
        for top in list(vars(module).values())
        for kernel in (top, getattr(top, "fn", None))
        if isinstance(kernel, Autotuner)
    }
    assert len(tuned) > 20
    assert {len(kernel.configs) for kernel in tuned.values()} == {1}


def test_no_call_is_handed_on_to_another_library() -> None:
    import fla.backends

    assert fla.backends._DISPATCH_DISABLED
