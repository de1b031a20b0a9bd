"""Rows of many tasks in one product of torch's: only where it is shown that none sees another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mlora_worker.frozen import joining as module
from mlora_worker.frozen.joining import FEWEST, MOST, JoiningWeight, freeze_joining, joining
from mlora_worker.frozen.plain import DenseMultiplier, PlainWeight
from tests.fixtures.stories import stories

SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536), (17, 33))
ROWS = MOST + 200


def drawn(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@st.composite
def cut(draw: st.DrawFn) -> slice:
    start = draw(st.integers(0, ROWS - 1))
    return slice(start, draw(st.integers(start + 1, ROWS)))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(shape: tuple[int, int]) -> None:
    """Whatever their number, and wherever it lies among them; of shapes for which it was shown here."""
    if not joining([shape], torch.float32):
        pytest.skip("not so on this processor with so many threads")
    multiplier = JoiningWeight(drawn(*shape, seed=0)).multiplier(torch.float32)
    assert multiplier.joins_rows
    x, grad = drawn(ROWS, shape[1], seed=1), drawn(ROWS, shape[0], seed=2)
    bias, onto = drawn(shape[0], seed=3), drawn(ROWS, shape[1], seed=4)
    y, with_bias = multiplier.times(x), multiplier.times(x, bias)
    back, added = multiplier.back(grad), multiplier.back(grad, onto=onto.clone())

    @settings(max_examples=stories(40), deadline=None)
    @given(cut())
    def alone(own: slice) -> None:
        assert torch.equal(multiplier.times(x[own]), y[own])
        assert torch.equal(multiplier.times(x[own], bias), with_bias[own])
        assert torch.equal(multiplier.back(grad[own]), back[own])
        assert torch.equal(multiplier.back(grad[own], onto=onto[own].clone()), added[own])

    alone()


@pytest.mark.parametrize("rows", [0, 1, FEWEST - 1, FEWEST, MOST, MOST + 1, 2 * MOST + 5])
def test_both_products_are_those_of_the_plain_matrix(rows: int) -> None:
    matrix, bias = drawn(7, 5, seed=0), drawn(7, seed=1)
    x, grad, onto = drawn(rows, 5, seed=2), drawn(rows, 7, seed=3), drawn(rows, 5, seed=4)
    weight = JoiningWeight(matrix)
    multiplier = weight.multiplier(torch.float32)
    torch.testing.assert_close(multiplier.times(x), x @ matrix.T)
    torch.testing.assert_close(multiplier.back(grad), grad @ matrix)
    out, into = torch.empty(rows, 7), torch.empty(rows, 5)
    assert multiplier.times(x, bias, out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, x @ matrix.T + bias)
    torch.testing.assert_close(multiplier.back(grad, onto=onto.clone(), out=into), grad @ matrix + onto)
    total = onto.clone()
    assert multiplier.back(grad, onto=total).data_ptr() == total.data_ptr()
    torch.testing.assert_close(total, grad @ matrix + onto)
    torch.testing.assert_close(weight(x[None], bias)[0], out)


def test_a_library_that_adds_up_by_the_number_of_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rows(own: DenseMultiplier, x: Tensor, bias: Tensor | None = None) -> Tensor:
        half = x.shape[1] // 2 if len(x) > 200 else x.shape[1]
        y = x[:, :half] @ own.matrix[:, :half].T + x[:, half:] @ own.matrix[:, half:].T
        return y if bias is None else y + bias

    monkeypatch.setattr(DenseMultiplier, "times", by_rows)
    assert not joining([(64, 64)], torch.float32)


def test_a_library_that_adds_up_by_where_a_row_lies_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = DenseMultiplier.back

    def by_place(
        own: DenseMultiplier, grad: Tensor, onto: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        total = plain(own, grad, onto, out)
        total[32::FEWEST] *= 1 + 2e-7
        return total

    monkeypatch.setattr(DenseMultiplier, "back", by_place)
    assert not joining([(64, 64)], torch.float32)


def test_what_is_not_tried_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert freeze_joining(frozenset()) is PlainWeight
    assert not joining([(8, 8)], torch.bfloat16)
    monkeypatch.setattr(module, "_LARGEST", 63)
    assert not joining([(8, 8)], torch.float32)
    freeze = freeze_joining(frozenset({(8, 4)}))
    assert type(freeze(torch.ones(8, 4))) is JoiningWeight
    assert type(freeze(torch.ones(4, 8))) is PlainWeight
