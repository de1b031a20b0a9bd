"""Quantised weights: how much is lost, how many bytes are left, and that the library fetches nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from mlora_worker.frozen import four_bits
from mlora_worker.frozen.four_bits import four_bit_bytes, nf4
from mlora_worker.frozen.fp8 import BlockFp8Weight, block_fp8_bytes, scales_of
from mlora_worker.frozen.int8 import int8, int8_bytes
from mlora_worker.frozen.quantised import QuantisedWeight
from mlora_worker.pipeline.allocations import CpuLedger
from mlora_worker.stream.footprint import UNPACKING_BYTES

SHAPES = [(192, 64), (33, 7), (97, 130)]  # whole blocks; an odd number of weights; a last block that is short
FP8 = (16, 32)


def fp8(matrix: Tensor) -> BlockFp8Weight:
    """As files are published: each block by its largest magnitude."""
    scales = torch.empty(scales_of((matrix.shape[0], matrix.shape[1]), FP8))
    numbers = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = (
                slice(row * FP8[0], (row + 1) * FP8[0]),
                slice(column * FP8[1], (column + 1) * FP8[1]),
            )
            scales[row, column] = matrix[block].float().abs().max() / 448
            numbers[block] = (matrix[block].float() / scales[row, column]).to(torch.float8_e4m3fn)
    return BlockFp8Weight(numbers, scales, FP8, matrix.dtype)


KINDS: dict[str, tuple[Callable[[Tensor], QuantisedWeight], Callable[[int, int], int], float]] = {
    "nf4, double": (partial(nf4, double=True), partial(four_bit_bytes, double=True), 0.12),
    "nf4": (partial(nf4, double=False), partial(four_bit_bytes, double=False), 0.12),
    "int8": (int8, int8_bytes, 0.01),
    "fp8": (fp8, partial(block_fp8_bytes, block=FP8), 0.04),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_dense_matrix_is_near_and_the_bytes_are_as_few_as_said(
    kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    make, bytes_of, lost = KINDS[kind]
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = matrix.clone()
    weight = make(matrix)
    dense = weight.dense(dtype)
    assert torch.equal(matrix, kept), "what was read is not written to"
    assert (weight.shape, dense.shape, dense.dtype) == (shape, shape, dtype)
    assert 0 < (dense - matrix).float().norm() / matrix.float().norm() < lost
    assert weight.resident_bytes == bytes_of(*shape)
    assert torch.equal(weight.dense(torch.float32), dense.float()), "rounded to the stage's type first"


def test_a_matrix_of_many_parts_is_put_together_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(97, 130, generator=torch.Generator().manual_seed(0))
    whole = [int8(matrix), fp8(matrix)]
    wanted = [one.dense(torch.float32) for one in whole]
    monkeypatch.setattr("mlora_worker.frozen.quantised._AT_ONCE", 130 * 20)
    assert torch.equal(int8(matrix).dense(torch.float32), wanted[0])
    for one, dense in zip(whole, wanted, strict=True):
        assert torch.equal(one.dense(torch.float32), dense)


def test_what_making_a_matrix_dense_takes_beside_it_is_no_more_than_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ledger passes over it, so here it counts under another name."""
    monkeypatch.setattr("mlora_worker.pipeline.allocations.UNPACKING", "")
    matrix = torch.randn(700, 390, generator=torch.Generator().manual_seed(0))
    scales = matrix.abs().amax(1, keepdim=True) / 448
    by_channel = BlockFp8Weight((matrix / scales).to(torch.float8_e4m3fn), scales, (1, 390), torch.float32)
    for weight in (
        nf4(matrix, double=True),
        nf4(matrix, double=False),
        int8(matrix),
        fp8(matrix),
        by_channel,
    ):
        weight.unpacked()
        ledger = CpuLedger()
        with ledger.follow("forward"):
            dense = weight.dense(torch.float32)
        assert ledger.held >= dense.nbytes
        assert 0 < ledger.peak("forward") - dense.nbytes <= UNPACKING_BYTES


def test_a_row_of_zeros_stays_one() -> None:
    matrix = torch.zeros(2, 64)
    matrix[1] = 3.0
    for make in (int8, partial(nf4, double=False)):
        torch.testing.assert_close(make(matrix).dense(torch.float32), matrix)


def test_the_largest_of_each_row_keeps_its_value_in_int8() -> None:
    matrix = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    dense = int8(matrix).dense(torch.float32)
    torch.testing.assert_close(dense.abs().amax(1), matrix.abs().amax(1))


def test_the_library_is_imported_without_the_package_that_fetches_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.py").write_text("raise SystemExit('it was asked for')\n")
    # Processors without these instructions never ask, so the question is asked of a library that always does.
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("")
    (tmp_path / "bitsandbytes" / "functional.py").write_text(
        "try:\n    import kernels\nexcept ImportError:\n    ASKED = False\nelse:\n    ASKED = True\n"
    )
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
            del sys.modules[name]
        monkeypatch.syspath_prepend(tmp_path)
        assert four_bits._library.__wrapped__().ASKED is False
        assert "kernels" not in sys.modules
