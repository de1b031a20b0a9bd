"""Attention by blocks of a row: exact over many blocks, in all types; no row sees another; what diverges shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlora_worker.model.attention import PackedRows
from mlora_worker.model.row_attention import computes_rows, row_attention

SCALE = 0.3


def rows_of(*lengths: int) -> tuple[slice, ...]:
    return PackedRows(lengths, torch.device("cpu")).slices


def heads_of(*counts: int, tokens: int, size: int = 16, seed: int = 0) -> list[Tensor]:
    """[1, heads, tokens, size] each, laid out as a layer's projections are."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, tokens, n, size, generator=generator).transpose(1, 2).requires_grad_() for n in counts
    ]


def written_out(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Of one row, in float64."""
    q, k, v = (tensor[0].double() for tensor in (query, key, value))
    k, v = (tensor.repeat_interleave(len(q) // len(k), 0) for tensor in (k, v))
    at = torch.arange(q.shape[1])
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < (window or len(at)))
    return ((q @ k.mT * SCALE).masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)[None]


def gradients(out: Tensor, states: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, states, upstream.to(out.dtype), retain_graph=True)


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str
)
@pytest.mark.parametrize("window", [None, 1, 40, 100])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_a_row_of_any_number_of_blocks(
    length: int, window: int | None, dtype: torch.dtype, close: float
) -> None:
    states = [one.detach().to(dtype).requires_grad_() for one in heads_of(6, 2, 2, tokens=length)]
    out = row_attention(states[0], states[1], states[2], rows_of(length), SCALE, window)
    wanted = written_out(states[0], states[1], states[2], window)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, rtol=close, atol=close)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for found, expected in zip(
        gradients(out, states, upstream), gradients(wanted, states, upstream), strict=True
    ):
        size = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found, expected, rtol=10 * close, atol=10 * close * size)


def test_values_of_another_size() -> None:
    query, key = heads_of(4, 4, tokens=70, size=24)
    (value,) = heads_of(4, tokens=70, size=16, seed=1)
    out = row_attention(query, key, value, rows_of(70), SCALE, None)
    assert out.shape == (1, 70, 4, 16)
    torch.testing.assert_close(out.double(), written_out(query, key, value, None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [8, 16, 72])
def test_a_row_has_the_same_bits_beside_any_neighbours(
    window: int | None, dtype: torch.dtype, size: int
) -> None:
    lengths = (90, 7, 128, 64)
    states = [
        one.detach().to(dtype).requires_grad_() for one in heads_of(6, 2, 2, tokens=sum(lengths), size=size)
    ]
    upstream = torch.randn(1, sum(lengths), 6, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = row_attention(states[0], states[1], states[2], rows_of(*lengths), SCALE, window)
    grads = gradients(out, states, upstream)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        own = [one.detach()[:, :, rows].clone().requires_grad_() for one in states]
        alone = row_attention(own[0], own[1], own[2], rows_of(length), SCALE, window)
        assert torch.equal(alone, out[:, rows])
        for found, wanted in zip(gradients(alone, own, upstream[:, rows]), grads, strict=True):
            assert torch.equal(found, wanted[:, :, rows])
        start += length


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_stays_so_in_its_own_row(bad: float) -> None:
    """A task whose loss must be seen to be NaN, and a neighbour that must not notice."""
    states = heads_of(2, 2, 2, tokens=150)
    with torch.no_grad():
        states[1][0, 0, 10] = bad
    out = row_attention(states[0], states[1], states[2], rows_of(100, 50), SCALE, None)
    assert out[0, :10].isfinite().all()
    assert out[0, 10:100, 0].isnan().all(dim=-1).any()
    assert out[0, 100:].isfinite().all()
    for grad in gradients(out, states, torch.ones_like(out)):
        assert not grad[0, 0, :100].isfinite().all()
        assert grad[0, :, 100:].isfinite().all()


def test_scores_of_any_size_do_not_overflow() -> None:
    query, key, value = heads_of(2, 2, 2, tokens=80)
    large = [(one.detach() * 100).requires_grad_() for one in (query, key)]
    out = row_attention(large[0], large[1], value, rows_of(80), SCALE, None)
    torch.testing.assert_close(out.double(), written_out(*large, value, None), rtol=1e-3, atol=1e-3)


def test_many_threads_and_other_types_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(1, 1, 2, 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert computes_rows(tensor)
    assert not computes_rows(tensor.double())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert not computes_rows(tensor)
