"""Products by oneDNN: as exact as plain ones, no row sees another, and no copy of the weight stays."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mlora_worker.frozen.onednn import OneDnnWeight, available, joins_rows

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if available(dtype)]
pytestmark = pytest.mark.skipif(not DTYPES, reason="this build of torch has no oneDNN")
ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Odd ones, those of a small model, and of one with grouped keys.
SHAPES = [(576, 576), (192, 576), (1536, 576), (576, 1536), (130, 70), (17, 33), (2048, 512)]
MOST = 1100  # rows


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, wanted: Tensor) -> bool:
    exact = wanted.double()
    return bool((found.double() - exact).abs().max() <= ERROR[found.dtype] * exact.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 40, 400])
def test_both_products_are_those_of_the_plain_matrix(
    dtype: torch.dtype, shape: tuple[int, int], rows: int
) -> None:
    matrix, bias = drawn(*shape, dtype=dtype), drawn(shape[0], dtype=dtype, seed=1)
    x, grad = drawn(rows, shape[1], dtype=dtype, seed=2), drawn(rows, shape[0], dtype=dtype, seed=3)
    multiplier = OneDnnWeight(matrix.clone()).multiplier(dtype)
    exact = matrix.double()
    assert close(multiplier.times(x), x.double() @ exact.T)
    assert close(multiplier.times(x, bias), x.double() @ exact.T + bias.double())
    assert close(multiplier.back(grad), grad.double() @ exact)
    onto = drawn(rows, shape[1], dtype=dtype, seed=4)
    wanted = grad.double() @ exact + onto.double()
    assert close(multiplier.back(grad, onto=onto.clone()), wanted)
    out = torch.empty_like(onto)
    assert multiplier.back(grad, out=out).data_ptr() == out.data_ptr()
    assert close(out, grad.double() @ exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_is_the_tensor_itself(dtype: torch.dtype) -> None:
    matrix = drawn(192, 576, dtype=dtype)
    weight = OneDnnWeight(matrix)
    weight.multiplier(dtype).back(weight.multiplier(dtype).times(drawn(50, 576, dtype=dtype)))
    assert weight.dense(dtype).data_ptr() == matrix.data_ptr()
    assert weight.resident_bytes == matrix.nbytes


@st.composite
def cut(draw: st.DrawFn) -> tuple[int, int]:
    start = draw(st.integers(0, MOST - 1))
    return start, draw(st.integers(start + 1, MOST))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if joins_rows(dtype)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Whatever their number, and wherever it lies among them: this is what lets tasks share a product."""
    multiplier = OneDnnWeight(drawn(*shape, dtype=dtype)).multiplier(dtype)
    assert multiplier.joins_rows
    x, grad = drawn(MOST, shape[1], dtype=dtype, seed=1), drawn(MOST, shape[0], dtype=dtype, seed=2)
    bias, onto = drawn(shape[0], dtype=dtype, seed=3), drawn(MOST, shape[1], dtype=dtype, seed=4)
    y, with_bias = multiplier.times(x), multiplier.times(x, bias)
    back, added = multiplier.back(grad), multiplier.back(grad, onto=onto.clone())

    @given(cut())
    def alone(rows: tuple[int, int]) -> None:
        own = slice(*rows)
        assert torch.equal(multiplier.times(x[own]), y[own])
        assert torch.equal(multiplier.times(x[own], bias), with_bias[own])
        assert torch.equal(multiplier.back(grad[own]), back[own])
        assert torch.equal(multiplier.back(grad[own], onto=onto[own].clone()), added[own])

    alone()


def test_where_tiles_are_multiplied_narrow_rows_are_not_multiplied_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processors with units for tiles add up by the number of rows."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not OneDnnWeight(drawn(17, 33, dtype=torch.bfloat16)).multiplier(torch.bfloat16).joins_rows
    assert OneDnnWeight(drawn(17, 33, dtype=torch.float32)).multiplier(torch.float32).joins_rows


PROGRAM = """
import mlora_worker
import torch
from mlora_worker.frozen.onednn import OneDnnWeight
from mlora_worker.runtime.allocator import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

keep_freed_memory()
torch.set_num_threads(1)
multiplier = OneDnnWeight(torch.randn(256, 256)).multiplier(torch.float32)
x = torch.randn(1000, 256)
for rows in (1000, *range(600, 856)):
    multiplier.times(x[:rows])
before = resident()
for rows in range(2, 600):
    multiplier.times(x[:rows])
print(resident() - before)
"""


def test_microbatches_of_many_widths_do_not_fill_the_memory_with_kernels() -> None:
    """In a process of its own: the bound is read when torch is imported."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 * 2**20


COPIES = """
import mlora_worker
import torch
from mlora_worker.frozen.onednn import OneDnnWeight

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024

torch.set_num_threads(1)
weight = OneDnnWeight(torch.randn(16384, 1536))  # 96 MiB
x = torch.randn(64, 1536)

def products(rows):
    multiplier = weight.multiplier(torch.float32)
    multiplier.back(multiplier.times(x[:rows]))

products(8)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
products(64)
print(status("VmHWM") - before)
"""


def test_a_product_copies_no_weight() -> None:
    """What the library puts in order lasts for a part of the product: it is not counted."""
    done = subprocess.run([sys.executable, "-c", COPIES], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32 * 2**20
