"""The fused function beside its plain reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mlora_worker.frozen.onednn import OneDnnWeight, available
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.frozen.weight import FrozenWeight
from mlora_worker.lora.cpu import CpuProducts
from mlora_worker.lora.dropout import dropout_mask, token_keys
from mlora_worker.lora.function import GroupedLinears, row_blocks
from mlora_worker.lora.groups import GroupSegment
from mlora_worker.lora.reference import linears_with_products
from tests.fixtures.stories import stories


@dataclass(frozen=True)
class Part:
    """A segment: its tokens, and its adapter on this group (rank 0: it has none)."""

    tokens: int
    rank: int
    scale: float
    weight: float
    dropout: float
    members: tuple[int, ...] = (0,)


parts = st.lists(
    st.builds(
        Part,
        tokens=st.integers(1, 9),
        rank=st.integers(0, 5),
        scale=st.sampled_from([0.25, 1.0, 3.0]),
        weight=st.sampled_from([0.0, 0.1, 1.0]),
        dropout=st.sampled_from([0.0, 0.3, 0.9]),
        members=st.sampled_from([(0,), (1,), (0, 1), (0, 2), (0, 1, 2)]),
    ),
    min_size=1,
    max_size=5,
)


@dataclass
class Case:
    x: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    segments: tuple[GroupSegment, ...]
    upstream: tuple[Tensor, ...]


def build(layout: list[Part], inputs: int, outputs: tuple[int, ...], bias: bool, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(sum(part.tokens for part in layout) * 100 + inputs)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    segments, start = [], 0
    for number, part in enumerate(layout):
        stop = start + part.tokens
        keys = token_keys(number, 1, 0, (part.tokens,))
        members = tuple(member for member in part.members if member < len(outputs))
        if part.rank and members:
            a = draw(part.rank * len(members), inputs)
            b = tuple(draw(outputs[member], part.rank) for member in members)
            buffer = dtype if dtype == torch.float64 else torch.float32
            segments.append(
                GroupSegment(
                    rows=slice(start, stop),
                    rank=part.rank,
                    members=members,
                    a=a,
                    b=b,
                    grad_a=torch.zeros_like(a, dtype=buffer),
                    grad_b=tuple(torch.zeros_like(one, dtype=buffer) for one in b),
                    scale=part.scale,
                    weight=part.weight,
                    mask=dropout_mask(keys, "m", inputs, part.dropout) if part.dropout else None,
                )
            )
        start = stop
    return Case(
        draw(start, inputs),
        tuple(draw(out, inputs) for out in outputs),
        tuple(draw(out) if bias else None for out in outputs),
        tuple(segments),
        tuple(draw(start, out) for out in outputs),
    )


class Blocks(CpuProducts):
    def __init__(self, rows: int | None) -> None:
        self.rows_per_block = rows


def fused(
    case: Case,
    x: Tensor,
    rows_per_block: int | None = 4,
    kind: Callable[[Tensor], FrozenWeight] = PlainWeight,
) -> tuple[Tensor, ...]:
    anchor = torch.zeros((), requires_grad=True)
    out: tuple[Tensor, ...] = GroupedLinears.apply(
        x, anchor, Blocks(rows_per_block), case.segments, [*map(kind, case.weights)], case.biases
    )
    return out


@settings(max_examples=stories(60), deadline=None)
@given(
    layout=parts,
    inputs=st.integers(1, 9),
    outputs=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    bias=st.booleans(),
    block=st.sampled_from([None, 1, 3, 448]),
)
def test_it_equals_the_reference_on_odd_shapes(
    layout: list[Part], inputs: int, outputs: list[int], bias: bool, block: int | None
) -> None:
    case = build(layout, inputs, tuple(outputs), bias, torch.float64)
    x = case.x.clone().requires_grad_()
    ys = [y[0] for y in fused(case, x[None], block)]
    torch.autograd.backward(ys, case.upstream)

    leaves = [
        (s.a.clone().requires_grad_(), tuple(b.clone().requires_grad_() for b in s.b)) for s in case.segments
    ]
    plain_x = case.x.clone().requires_grad_()
    plain = linears_with_products(plain_x, case.weights, case.biases, case.segments, leaves)
    torch.autograd.backward(plain, case.upstream)

    for y, wanted in zip(ys, plain, strict=True):
        torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(x.grad, plain_x.grad)
    for segment, (a, bs) in zip(case.segments, leaves, strict=True):
        assert a.grad is not None
        torch.testing.assert_close(segment.grad_a, a.grad * segment.weight)
        for grad_b, b in zip(segment.grad_b, bs, strict=True):
            torch.testing.assert_close(grad_b, b.grad * segment.weight)


def test_the_input_gradient_passes_gradcheck() -> None:
    layout = [
        Part(3, 2, 0.5, 1.0, 0.0, (0, 1)),
        Part(2, 0, 1.0, 1.0, 0.0),
        Part(4, 3, 2.0, 1.0, 0.4, (1,)),
    ]
    case = build(layout, 5, (4, 3), True, torch.float64)
    assert torch.autograd.gradcheck(lambda x: fused(case, x), case.x.requires_grad_())


def test_gradients_add_up_over_microbatches() -> None:
    case = build([Part(6, 3, 1.0, 0.5, 0.0)], 4, (5,), False, torch.float32)
    grad_b = case.segments[0].grad_b[0]
    for _ in range(3):
        fused(case, case.x)[0].backward(case.upstream[0])
    thrice = grad_b.clone()
    grad_b.zero_()
    fused(case, case.x)[0].backward(case.upstream[0])
    torch.testing.assert_close(thrice, 3 * grad_b)


def test_adapters_learn_when_the_input_needs_no_gradient() -> None:
    case = build([Part(6, 3, 1.0, 1.0, 0.0)], 4, (5,), False, torch.float32)
    assert not case.x.requires_grad
    fused(case, case.x)[0].backward(case.upstream[0])
    assert case.segments[0].grad_a.any()


def test_a_segment_that_is_not_finite_leaves_the_others_alone() -> None:
    case = build([Part(4, 2, 1.0, 1.0, 0.0), Part(5, 3, 1.0, 1.0, 0.2)], 4, (5,), False, torch.float32)
    case.segments[0].b[0].fill_(torch.nan)
    x = case.x.clone().requires_grad_()
    (y,) = fused(case, x)
    y.backward(case.upstream[0])
    assert y[:4].isnan().all()
    assert x.grad is not None
    for tensor in (y[4:], x.grad[4:], case.segments[1].grad_a, *case.segments[1].grad_b):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("block", [None, 16])
def test_a_segment_is_computed_in_the_same_way_beside_any_neighbours(block: int | None) -> None:
    """On blocks of a CPU, bit for bit; a device that takes all at once promises that in its kernels."""
    own = Part(70, 4, 1.0, 0.5, 0.1)
    alone = build([own], 24, (16, 8), False, torch.float32)
    beside = build(
        [Part(37, 3, 2.0, 1.0, 0.0), own, Part(9, 2, 1.0, 1.0, 0.3)], 24, (16, 8), False, torch.float32
    )
    mine = beside.segments[1]
    mine.a.copy_(alone.segments[0].a)
    mine.b[0].copy_(alone.segments[0].b[0])
    mine = replace(mine, mask=alone.segments[0].mask)
    x = beside.x.clone()
    x[37:107] = alone.x
    upstream = [up.clone() for up in beside.upstream]
    for up, one in zip(upstream, alone.upstream, strict=True):
        up[37:107] = one
    beside = replace(
        beside, x=x, weights=alone.weights, segments=(beside.segments[0], mine, beside.segments[2])
    )
    results = []
    for case, ups, rows in ((alone, alone.upstream, slice(0, 70)), (beside, upstream, slice(37, 107))):
        leaf = case.x.clone().requires_grad_()
        ys = fused(case, leaf, block)
        torch.autograd.backward(ys, ups)
        segment = case.segments[0 if case is alone else 1]
        results.append([*(y[rows] for y in ys), leaf.grad[rows], segment.grad_a, *segment.grad_b])
    for found, wanted in zip(results[1], results[0], strict=True):
        if block is None:
            torch.testing.assert_close(found, wanted)
        else:
            assert torch.equal(found, wanted)


@pytest.mark.skipif(not available(torch.float32), reason="this build of torch has no oneDNN")
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_packed_weights_multiply_rows_of_all_segments_at_once_and_give_the_same(kind: str) -> None:
    """With a part that has no adapter; outputs and all gradients."""
    dtype = getattr(torch, kind)
    if not available(dtype):
        pytest.skip(f"this processor does not multiply {kind}")
    layout = [
        Part(37, 3, 2.0, 1.0, 0.2, (0, 1)),
        Part(11, 0, 1.0, 1.0, 0.0),
        Part(70, 4, 1.0, 0.5, 0.0, (1,)),
    ]
    results = []
    for packed in (False, True):
        case = build(layout, 64, (32, 48), True, dtype)
        x = case.x.clone().requires_grad_()
        ys = fused(case, x, 16, OneDnnWeight if packed else PlainWeight)
        torch.autograd.backward(ys, case.upstream)
        grads = [grad for segment in case.segments for grad in (segment.grad_a, *segment.grad_b)]
        results.append([*ys, x.grad, *grads])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for found, wanted in zip(results[1], results[0], strict=True):
        assert (found - wanted).norm() <= tolerance * wanted.norm()


def test_blocks_hold_each_row_once_and_one_segment_at_most() -> None:
    case = build(
        [Part(100, 0, 1, 1, 0), Part(50, 2, 1, 1, 0.1), Part(7, 2, 1, 1, 0), Part(33, 0, 1, 1, 0)],
        4,
        (4,),
        False,
        torch.float32,
    )
    blocks = list(row_blocks(190, case.segments, 20))
    rows = [row for block, _ in blocks for row in range(block.start, block.stop)]
    assert rows == list(range(190))
    assert all(len(own) <= 1 for _, own in blocks)
    assert all(block.stop - block.start <= 30 for block, _ in blocks)
    assert sum(len(own) for _, own in blocks) == 3  # 50 rows in 2 blocks, 7 in one
    for block, own in blocks:
        for segment in own:
            assert segment.rows == slice(0, block.stop - block.start)
            if segment.mask is not None:
                assert len(segment.mask.token_keys) == block.stop - block.start


def test_half_precision_sums_gradients_in_float32() -> None:
    layout = [Part(7, 4, 1.0, 1.0, 0.3, (0, 1))]
    case = build(layout, 16, (16, 8), False, torch.bfloat16)
    x = case.x.clone().requires_grad_()
    ys = fused(case, x)
    torch.autograd.backward(ys, case.upstream)
    exact = build(layout, 16, (16, 8), False, torch.float64)
    segment, own = exact.segments[0], case.segments[0]
    segment.a.copy_(own.a)
    for b, copied in zip(segment.b, own.b, strict=True):
        b.copy_(copied)
    exact = replace(
        exact,
        x=case.x.double().requires_grad_(),
        weights=tuple(weight.double() for weight in case.weights),
        upstream=tuple(up.double() for up in case.upstream),
    )
    exact_ys = fused(exact, exact.x)
    torch.autograd.backward(exact_ys, exact.upstream)
    for found, wanted in zip(
        (*ys, x.grad, own.grad_a, *own.grad_b),
        (*exact_ys, exact.x.grad, segment.grad_a, *segment.grad_b),
        strict=True,
    ):
        assert found is not None
        assert wanted is not None
        assert (found - wanted).norm() < 0.02 * wanted.norm()
    assert own.grad_a.dtype == torch.float32
