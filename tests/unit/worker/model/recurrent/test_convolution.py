"""The convolution of all packed rows by one kernel beside torch's, row by row: in Triton's interpreter, or on a GPU with
``MLORA_TEST_DEVICE=cuda``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv1d, silu

from mlora_worker.model.attention import PackedRows
from mlora_worker.runtime.kernel_compiler import launch
from tests.fixtures.interpreted import DEVICE, convolution

# The interpreter rounds to bfloat16 by cutting, which is twice as far off.
LIMITS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, lengths: tuple[int, ...], then_silu: bool
) -> Tensor:
    outs = []
    for row in x.split(list(lengths), dim=1):
        taps = weight.shape[1]
        out = conv1d(row.transpose(1, 2), weight[:, None], bias, padding=taps - 1, groups=len(weight))
        out = out[..., : row.shape[1]].transpose(1, 2)
        outs.append(silu(out) if then_silu else out)
    return torch.cat(outs, dim=1)


def kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, lengths: tuple[int, ...], then_silu: bool
) -> Tensor:
    return convolution.convolve(x, weight, bias, PackedRows(lengths, DEVICE), then_silu, launch)


def with_gradient(function: object, x: Tensor, upstream: Tensor, *others: object) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    y = function(leaf, *others)  # type: ignore[operator]
    y.backward(upstream)
    assert leaf.grad is not None
    return [y.detach(), leaf.grad]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple),
    channels=st.sampled_from([1, 5, 130]),
    taps=st.integers(2, 4),
    biased=st.booleans(),
    then_silu=st.booleans(),
)
def test_outputs_and_input_gradients_equal_torchs_row_by_row(
    dtype: torch.dtype, lengths: tuple[int, ...], channels: int, taps: int, biased: bool, then_silu: bool
) -> None:
    x, upstream = (drawn(1, sum(lengths), channels, seed=seed, dtype=dtype) for seed in (1, 2))
    weight = drawn(channels, taps, seed=3, dtype=dtype)
    bias = drawn(channels, seed=4, dtype=dtype) if biased else None
    others = weight, bias, lengths, then_silu
    wide = weight.double(), None if bias is None else bias.double(), lengths, then_silu
    wanted = with_gradient(plain, x.double(), upstream.double(), *wide)
    # Terms may cancel out; what is rounded is as large as they are.
    amounts = wide[0].abs(), None if wide[1] is None else wide[1].abs(), lengths, False
    sizes = with_gradient(plain, x.double().abs(), upstream.double().abs(), *amounts)
    for found, right, size in zip(with_gradient(kernel, x, upstream, *others), wanted, sizes, strict=True):
        assert found.dtype == dtype
        assert (found.double() - right).norm() <= LIMITS[dtype] * size.norm()


def test_a_row_has_the_same_bits_alone_and_wherever_it_lies() -> None:
    lengths = (3, 20, 1, 18)
    x, upstream = (drawn(1, sum(lengths), 130, seed=seed) for seed in (1, 2))
    weight, bias = drawn(130, 4, seed=3), drawn(130, seed=4)
    together = with_gradient(kernel, x, upstream, weight, bias, lengths, True)
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        alone = with_gradient(kernel, x[:, own], upstream[:, own], weight, bias, (length,), True)
        assert all(torch.equal(one, other[:, own]) for one, other in zip(alone, together, strict=True))
        start += length


def test_a_part_of_a_wider_projection_is_read_where_it_lies() -> None:
    """Without a copy, which is what its stride is for."""
    wide = drawn(1, 9, 50)
    part = wide[..., 7:31]
    weight = drawn(24, 3, seed=3)
    found = kernel(part, weight, None, (4, 5), True)
    assert (found - plain(part, weight, None, (4, 5), True)).abs().max() <= 1e-5
    turned = drawn(1, 24, 9).transpose(1, 2)  # whose channels do not lie side by side
    found = kernel(turned, weight, None, (9,), False)
    assert (found - plain(turned, weight, None, (9,), False)).abs().max() <= 1e-5
