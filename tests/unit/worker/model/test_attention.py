"""Attention over packed rows, compared with a dense computation of each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mlora_worker.model import attention
from mlora_worker.model.attention import PackedRows, packed_attention
from tests.fixtures.stories import stories


def dense(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, cap: float | None
) -> Tensor:
    """[heads, length, size] of one row, written out."""
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    at = torch.arange(query.shape[1])
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < (window or len(at)))
    scores = query @ key.transpose(1, 2) * scaling
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


@pytest.fixture(autouse=True, params=[True, False], ids=["by rows", "by torch"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes the rows where there are many threads, or no compiler for loops."""
    if not request.param:
        monkeypatch.setattr(attention, "computes_rows", lambda _: False)


@settings(
    max_examples=stories(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    window=st.none() | st.integers(1, 10),
    scaling=st.sampled_from([0.1, 0.5]),
    cap=st.sampled_from([None, 0.7]),
)
def test_each_row_sees_itself_only_in_forward_and_backward(
    lengths: tuple[int, ...], heads: tuple[int, int], window: int | None, scaling: float, cap: float | None
) -> None:
    tokens, size = sum(lengths), 4
    generator = torch.Generator().manual_seed(tokens)
    query, key, value = (
        torch.randn(1, n, tokens, size, generator=generator, requires_grad=True)
        for n in (heads[0], heads[1], heads[1])
    )
    packed = PackedRows(lengths, torch.device("cpu"))
    out, _ = packed_attention(
        nn.Module(),
        query,
        key,
        value,
        None,
        packed=packed,
        scaling=scaling,
        sliding_window=window,
        softcap=cap,
    )
    parts = zip(*(t[0].split(list(lengths), dim=1) for t in (query, key, value)), strict=True)
    wanted = torch.cat([dense(q, k, v, scaling, window, cap) for q, k, v in parts], dim=1).transpose(0, 1)[
        None
    ]
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(out.shape, generator=generator)
    found = torch.autograd.grad(out, (query, key, value), upstream)
    expected = torch.autograd.grad(wanted, (query, key, value), upstream)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_positions_restart_at_each_row() -> None:
    rows = PackedRows((2, 3, 1), torch.device("cpu"))
    assert rows.position_ids.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert rows.boundaries.tolist() == [0, 2, 5, 6]
    assert rows.longest == 3


def test_chunks_begin_at_each_rows_start_and_are_made_once() -> None:
    rows = PackedRows((7, 5, 1, 11), torch.device("cpu"), (12, 12))
    chunks = rows.in_chunks(5)
    assert chunks.lengths == (5, 2, 5, 1, 5, 5, 1)
    assert (chunks.segments, chunks.tokens) == (rows.segments, rows.tokens)
    assert rows.in_chunks(5) is chunks
    assert rows.in_chunks(11) is rows, "no row is longer"
    assert rows.in_chunks(10).lengths == (7, 5, 1, 10, 1)


def test_arithmetic_that_is_not_known_is_refused() -> None:
    tensor = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="position_bias"):
        packed_attention(
            nn.Module(),
            tensor,
            tensor,
            tensor,
            None,
            packed=PackedRows((2,), torch.device("cpu")),
            position_bias=tensor,
        )


def test_key_heads_are_repeated_only_where_torch_does_not_know_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    plain = scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen.append(key.shape[1])
        out: Tensor = plain(query, key, value, **options)
        return out

    monkeypatch.setattr(attention, "computes_rows", lambda _: False)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, n, 12, 8, generator=generator, requires_grad=True) for n in (6, 2, 2))
    packed = PackedRows((5, 7), torch.device("cpu"))
    results = []
    for knows in (True, False):
        monkeypatch.setattr(attention, "_knows_grouped_heads", lambda *_, knows=knows: knows)
        out, _ = packed_attention(nn.Module(), query, key, value, None, packed=packed)
        grads = torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
        results.append((out, *grads))
    assert seen == [2, 2, 6, 6]
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_chunks_of_rows_and_rows_of_chunks_are_kept_apart() -> None:
    """Both are kept by the size of a chunk."""
    rows = PackedRows((5, 3), torch.device("cpu"))
    for _ in range(2):
        assert rows.chunks(4).tolist() == [[0, 0], [0, 1], [1, 0]]
        assert rows.in_chunks(4).lengths == (4, 1, 3)
