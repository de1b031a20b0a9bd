"""The fused function beside its plain reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mlora_worker.lora.dropout import dropout_mask, token_keys
from mlora_worker.lora.function import LinearWithProducts, Product
from mlora_worker.lora.reference import linear_with_products

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """A segment: its tokens, and its adapter on this module (rank 0: it has none)."""

    tokens: int
    rank: int
    scale: float
    weight: float
    dropout: float


parts = st.lists(
    st.builds(
        Part,
        tokens=st.integers(1, 7),
        rank=st.integers(0, 5),
        scale=st.sampled_from([0.25, 1.0, 3.0]),
        weight=st.sampled_from([0.0, 0.1, 1.0]),
        dropout=st.sampled_from([0.0, 0.3, 0.9]),
    ),
    min_size=1,
    max_size=5,
)


@dataclass
class Case:
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    products: tuple[Product, ...]
    upstream: Tensor


def build(layout: list[Part], inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(sum(part.tokens for part in layout) * 100 + inputs)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    products, start = [], 0
    for number, part in enumerate(layout):
        stop = start + part.tokens
        keys = token_keys(number, 1, 0, (part.tokens,), CPU)
        if part.rank:
            a, b = draw(part.rank, inputs), draw(outputs, part.rank)
            buffer = dtype if dtype == torch.float64 else torch.float32
            products.append(
                Product(
                    rows=slice(start, stop),
                    a=a,
                    b=b,
                    grad_a=torch.zeros_like(a, dtype=buffer),
                    grad_b=torch.zeros_like(b, dtype=buffer),
                    scale=part.scale,
                    weight=part.weight,
                    mask=dropout_mask(keys, "m", inputs, part.dropout) if part.dropout else None,
                )
            )
        start = stop
    return Case(
        draw(start, inputs),
        draw(outputs, inputs),
        draw(outputs) if bias else None,
        tuple(products),
        draw(start, outputs),
    )


def fused(case: Case, x: Tensor) -> Tensor:
    anchor = torch.zeros((), requires_grad=True)
    out: Tensor = LinearWithProducts.apply(x, anchor, case.weight, case.bias, case.products)
    return out


@settings(max_examples=60, deadline=None)
@given(layout=parts, inputs=st.integers(1, 9), outputs=st.integers(1, 9), bias=st.booleans())
def test_it_equals_the_reference_on_odd_shapes(
    layout: list[Part], inputs: int, outputs: int, bias: bool
) -> None:
    case = build(layout, inputs, outputs, bias, torch.float64)
    x = case.x.clone().requires_grad_()
    y = fused(case, x[None])[0]
    y.backward(case.upstream)

    leaves = [(p.a.clone().requires_grad_(), p.b.clone().requires_grad_()) for p in case.products]
    plain_x = case.x.clone().requires_grad_()
    plain_y = linear_with_products(plain_x, case.weight, case.bias, case.products, leaves)
    plain_y.backward(case.upstream)

    torch.testing.assert_close(y, plain_y)
    torch.testing.assert_close(x.grad, plain_x.grad)
    for product, (a, b) in zip(case.products, leaves, strict=True):
        torch.testing.assert_close(product.grad_a, a.grad * product.weight)
        torch.testing.assert_close(product.grad_b, b.grad * product.weight)


def test_the_input_gradient_passes_gradcheck() -> None:
    layout = [Part(3, 2, 0.5, 1.0, 0.0), Part(2, 0, 1.0, 1.0, 0.0), Part(4, 3, 2.0, 1.0, 0.4)]
    case = build(layout, 5, 4, True, torch.float64)
    assert torch.autograd.gradcheck(lambda x: fused(case, x), case.x.requires_grad_())


def test_gradients_add_up_over_microbatches() -> None:
    case = build([Part(6, 3, 1.0, 0.5, 0.0)], 4, 5, False, torch.float32)
    for _ in range(3):
        fused(case, case.x).backward(case.upstream)
    thrice = case.products[0].grad_b.clone()
    case.products[0].grad_b.zero_()
    fused(case, case.x).backward(case.upstream)
    torch.testing.assert_close(thrice, 3 * case.products[0].grad_b)


def test_adapters_learn_when_the_input_needs_no_gradient() -> None:
    case = build([Part(6, 3, 1.0, 1.0, 0.0)], 4, 5, False, torch.float32)
    assert not case.x.requires_grad
    fused(case, case.x).backward(case.upstream)
    assert case.products[0].grad_a.any()


def test_a_segment_that_is_not_finite_leaves_the_others_alone() -> None:
    case = build([Part(4, 2, 1.0, 1.0, 0.0), Part(5, 3, 1.0, 1.0, 0.2)], 4, 5, False, torch.float32)
    case.products[0].b.fill_(torch.nan)
    x = case.x.clone().requires_grad_()
    y = fused(case, x)
    y.backward(case.upstream)
    assert y[:4].isnan().all()
    for tensor in (y[4:], x.grad[4:], case.products[1].grad_a, case.products[1].grad_b):
        assert tensor.isfinite().all()


def test_half_precision_sums_gradients_in_float32() -> None:
    case = build([Part(7, 4, 1.0, 1.0, 0.3)], 16, 16, False, torch.bfloat16)
    x = case.x.clone().requires_grad_()
    y = fused(case, x)
    y.backward(case.upstream)
    exact = build([Part(7, 4, 1.0, 1.0, 0.3)], 16, 16, False, torch.float64)
    exact_x = case.x.double().requires_grad_()
    exact = replace(exact, x=exact_x, weight=case.weight.double(), upstream=case.upstream.double())
    product = exact.products[0]
    product.a.copy_(case.products[0].a)
    product.b.copy_(case.products[0].b)
    exact_y = fused(exact, exact_x)
    exact_y.backward(exact.upstream)
    for found, wanted in (
        (y, exact_y),
        (x.grad, exact_x.grad),
        (case.products[0].grad_a, product.grad_a),
        (case.products[0].grad_b, product.grad_b),
    ):
        assert (found - wanted).norm() < 0.02 * wanted.norm()
    assert case.products[0].grad_a.dtype == torch.float32
