"""Weights packed for oneDNN: as exact as plain ones, and no row sees another."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mlora_worker.frozen.packed import PackedWeight, UnpackedWeight, available

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if available(dtype)]
pytestmark = pytest.mark.skipif(not DTYPES, reason="this build of torch has no oneDNN")
ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Odd ones, those of a small model, and of one with grouped keys.
SHAPES = [(576, 576), (192, 576), (1536, 576), (576, 1536), (130, 70), (17, 33), (2048, 512)]
MOST = 1100  # rows
KINDS = [PackedWeight, UnpackedWeight]


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, wanted: Tensor) -> bool:
    exact = wanted.double()
    return bool((found.double() - exact).abs().max() <= ERROR[found.dtype] * exact.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 40, 400])
@pytest.mark.parametrize("kind", KINDS)
def test_both_products_are_those_of_the_plain_matrix(
    dtype: torch.dtype, shape: tuple[int, int], rows: int, kind: type[PackedWeight] | type[UnpackedWeight]
) -> None:
    matrix, bias = drawn(*shape, dtype=dtype), drawn(shape[0], dtype=dtype, seed=1)
    x, grad = drawn(rows, shape[1], dtype=dtype, seed=2), drawn(rows, shape[0], dtype=dtype, seed=3)
    packed = kind(matrix.clone()).multiplier(dtype)
    exact = matrix.double()
    assert close(packed.times(x), x.double() @ exact.T)
    assert close(packed.times(x, bias), x.double() @ exact.T + bias.double())
    assert close(packed.back(grad), grad.double() @ exact)
    onto = drawn(rows, shape[1], dtype=dtype, seed=4)
    wanted = grad.double() @ exact + onto.double()
    assert close(packed.back(grad, onto=onto.clone()), wanted)
    out = torch.empty_like(onto)
    assert packed.back(grad, out=out).data_ptr() == out.data_ptr()
    assert close(out, grad.double() @ exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_plain_matrix_need_not_stay_and_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    matrix = drawn(192, 576, dtype=dtype)
    wanted, x = matrix.clone(), drawn(50, 576, dtype=dtype, seed=1)
    weight = PackedWeight(matrix)
    before = weight.multiplier(dtype).times(x)
    matrix.fill_(torch.nan)
    del matrix
    gc.collect()
    held = [torch.full((192, 576), torch.nan, dtype=dtype) for _ in range(8)]
    assert torch.equal(weight.multiplier(dtype).times(x), before)
    assert torch.equal(weight.dense(dtype), wanted)
    assert len(held) == 8
    assert weight.resident_bytes == 2 * wanted.nbytes


@st.composite
def cut(draw: st.DrawFn) -> tuple[int, int]:
    start = draw(st.integers(0, MOST - 1))
    return start, draw(st.integers(start + 1, MOST))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(
    dtype: torch.dtype, shape: tuple[int, int], kind: type[PackedWeight] | type[UnpackedWeight]
) -> None:
    """Whatever their number, and wherever it lies among them: this is what lets tasks share a product."""
    packed = kind(drawn(*shape, dtype=dtype)).multiplier(dtype)
    x, grad = drawn(MOST, shape[1], dtype=dtype, seed=1), drawn(MOST, shape[0], dtype=dtype, seed=2)
    bias, onto = drawn(shape[0], dtype=dtype, seed=3), drawn(MOST, shape[1], dtype=dtype, seed=4)
    y, with_bias = packed.times(x), packed.times(x, bias)
    back, added = packed.back(grad), packed.back(grad, onto=onto.clone())

    @given(cut())
    def alone(rows: tuple[int, int]) -> None:
        own = slice(*rows)
        assert torch.equal(packed.times(x[own]), y[own])
        assert torch.equal(packed.times(x[own], bias), with_bias[own])
        assert torch.equal(packed.back(grad[own]), back[own])
        assert torch.equal(packed.back(grad[own], onto=onto[own].clone()), added[own])

    alone()


PROGRAM = """
import mlora_worker
import torch
from mlora_worker.frozen.packed import PackedWeight
from mlora_worker.runtime.allocator import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

keep_freed_memory()
torch.set_num_threads(1)
packed = PackedWeight(torch.randn(256, 256)).multiplier(torch.float32)
x = torch.randn(700, 256)
for rows in (700, *range(300, 364)):
    packed.times(x[:rows])
before = resident()
for rows in range(2, 300):
    packed.times(x[:rows])
print(resident() - before)
"""


def test_microbatches_of_many_widths_do_not_fill_the_memory_with_kernels() -> None:
    """In a process of its own: the bound is read when torch is imported."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40 * 2**20
