"""Every variant of every Triton kernel, compiled for GPUs that need not be there, and held to bounds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import mlora_worker
from tests.fixtures.compiled_apart import compiled_apart

pytest.importorskip("triton")
pytestmark = pytest.mark.integration

# Matrix instructions of the architecture; float32 is multiplied exactly, without them.
MULTIPLIES = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
# A processor of an A100 has 164 KiB of shared memory: three programs are there at once. Spills begin at 255 registers.
MOST_SHARED, MOST_REGISTERS = 54 * 1024, 254
FEW_BYTES = 8  # a thread, where ranks are no multiples of 8 or addresses none of 16: two registers for sm_100
# Between products only memory counts: many programs at once hide its latency.
MOST_REGISTERS_BETWEEN = {
    "gated_kernel": 64, "gated_backward_kernel": 64, "rotary_kernel": 64, "norm_kernel": 144, "norm_backward_kernel": 200,
    "cross_entropy_kernel": 96, "convolution_kernel": 96,
}  # fmt: skip
PRODUCTS = {
    "low_kernel",
    "output_kernel",
    "grad_low_kernel",
    "grad_input_kernel",
    "partial_gradients_kernel",
}


@pytest.mark.parametrize("architecture", MULTIPLIES)
def test_every_kernel_compiles_without_spilling_and_uses_matrix_units(architecture: str) -> None:
    """By Triton's own compiler and assembler, in a process of its own: here they may be interpreted."""
    found = compiled_apart("tests.fixtures.compile_kernels", architecture)
    assert {one["kernel"] for one in found} == written()
    wrong = {f"{one['name']}: {fault}" for one in found for fault in faults(one, MULTIPLIES[architecture])}
    assert not wrong


def written() -> set[str]:
    """All kernels of the worker, by its code."""
    texts = [path.read_text() for path in Path(mlora_worker.__path__[0]).rglob("triton_*.py")]
    return {
        name
        for text in texts
        for name in re.findall(r"^@triton\.jit\ndef (\w+_kernel)\(", text, re.MULTILINE)
    }


def faults(one: dict[str, Any], multiplies: str) -> list[str]:
    half, product = one["base"] != "fp32", one["kernel"] in PRODUCTS
    usual = one["choices"].get("ALIGNED", True) and one["choices"].get("VECTOR", 8) == 8
    bounds = {
        "spills": one["stack"] <= (0 if usual else FEW_BYTES),
        "registers": one["registers"] <= MOST_REGISTERS_BETWEEN.get(one["kernel"], MOST_REGISTERS),
        "shared memory": one["shared"] <= MOST_SHARED,
        "matrix units": set(one["multiplications"]) == ({multiplies} if half and product else set()),
        "asynchronous copies": not product or one["copies"] > 0,
    }
    return [f"{name}: {one}" for name, holds in bounds.items() if not holds]
