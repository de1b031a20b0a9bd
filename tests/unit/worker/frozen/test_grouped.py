"""All experts in one product: the values of the loop over them, by torch's own path on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import silu

from mlora_worker.frozen import grouped as module
from mlora_worker.frozen.experts import Biases, FrozenExperts, SegmentTokens
from mlora_worker.frozen.grouped import (
    GroupedExperts,
    grouped_if_equal,
    grouped_where_it_can,
    has_grouped_products,
    order_of,
)
from mlora_worker.frozen.int8 import int8
from mlora_worker.frozen.plain import PlainWeight

EXPERTS, K, SIZE, WIDTH = 5, 3, 32, 48
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
pytestmark = pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="torch has no such product")


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).div_(4).to(dtype)


def experts(
    dtype: torch.dtype, *, biases: bool, freeze: Callable[[Tensor], Any] = PlainWeight
) -> FrozenExperts:
    shapes = ((WIDTH, SIZE), (WIDTH, SIZE), (SIZE, WIDTH))
    gate, up, down = (
        [freeze(drawn(*shape, seed=10 * at + expert, dtype=dtype)) for expert in range(EXPERTS)]
        for at, shape in enumerate(shapes)
    )
    own = Biases(*(drawn(EXPERTS, shape[0], seed=100 + at, dtype=dtype) for at, shape in enumerate(shapes)))
    return FrozenExperts(
        gate, up, down, lambda gate, up: silu(gate) * up, SegmentTokens(), own if biases else None
    )


def choice(tokens: int, seed: int) -> Tensor:
    scores = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))
    scores[:, 1] = 0  # an expert that nobody chooses
    return scores.topk(K, dim=1).indices


def results(own: FrozenExperts, hidden: Tensor, weights: Tensor, chosen: Tensor) -> list[Tensor]:
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    y = own(hidden, chosen, weights)
    upstream = drawn(*y.shape, seed=8, dtype=y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (hidden, weights), upstream)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 60])
def test_output_and_gradients_are_those_of_the_loop(dtype: torch.dtype, biases: bool, tokens: int) -> None:
    loop = experts(dtype, biases=biases)
    hidden, weights = drawn(tokens, SIZE, seed=1, dtype=dtype), drawn(tokens, K, seed=2, dtype=dtype)
    chosen = choice(tokens, 3)
    wanted = results(loop, hidden, weights, chosen)
    found = results(GroupedExperts(loop), hidden, weights, chosen)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        difference = (one.double() - other.double()).abs().max() / other.double().abs().max()
        assert difference <= TOLERANCE[dtype]


def test_rows_lie_by_experts_and_each_ends_where_the_next_one_begins() -> None:
    chosen = torch.tensor([[3, 0], [0, 4], [3, 4]])
    order = order_of(chosen, EXPERTS)
    assert order.ends.tolist() == [2, 2, 2, 4, 6]
    assert order.experts.tolist() == [0, 0, 3, 3, 4, 4]
    assert order.tokens.tolist() == [0, 1, 0, 2, 1, 2]
    assert chosen.reshape(-1)[order.pairs].tolist() == order.experts.tolist()


def test_the_weights_become_views_of_the_stacks_and_the_loop_still_has_them() -> None:
    loop = experts(torch.float32, biases=False)
    own = loop.up[2].get_parameter
    kept = own("matrix").detach().clone()
    made = GroupedExperts(loop)
    assert made.stacks["up"][2].data_ptr() == own("matrix").data_ptr()
    assert torch.equal(made.stacks["up"][2], kept)
    assert sum(one.numel() for one in made.parameters()) == 3 * EXPERTS * SIZE * WIDTH


def test_products_that_adapters_add_take_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made = GroupedExperts(experts(torch.float32, biases=False))
    monkeypatch.setattr(made, "additions", lambda: (None, object()), raising=False)
    taken: list[str] = []
    monkeypatch.setattr(FrozenExperts, "forward", lambda *_: taken.append("loop"))
    made(drawn(2, SIZE, seed=0), choice(2, 0), torch.ones(2, K))
    assert taken == ["loop"]


def test_it_is_taken_if_it_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(grouped_if_equal(experts(torch.bfloat16, biases=True), torch.bfloat16, CPU)) is GroupedExperts
    right = GroupedExperts.back

    def wrong(own: GroupedExperts, name: str, grad: Tensor, order: Any) -> Tensor:
        return right(own, name, grad, order) * (1.1 if name == "up" else 1)

    monkeypatch.setattr(GroupedExperts, "back", wrong)
    assert type(grouped_if_equal(experts(torch.bfloat16, biases=True), torch.bfloat16, CPU)) is FrozenExperts


def test_a_product_that_fails_leaves_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(functional, "grouped_mm", fails)
    assert type(grouped_if_equal(experts(torch.bfloat16, biases=False), torch.bfloat16, CPU)) is FrozenExperts


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "sizes", "has"),
    [
        ("cuda", (9, 0), torch.bfloat16, (64, 32), True),
        ("cuda", (10, 0), torch.bfloat16, (64, 32), True),
        ("cuda", (8, 9), torch.bfloat16, (64, 32), False),
        ("cuda", (9, 0), torch.float32, (64, 32), False),
        ("cuda", (9, 0), torch.bfloat16, (64, 36), False),
        ("cpu", (9, 0), torch.bfloat16, (64, 32), False),
    ],
)
def test_which_devices_have_it(
    device: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    sizes: tuple[int, int],
    has: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert has_grouped_products(torch.device(device), dtype, sizes) is has


@pytest.mark.parametrize(("freeze", "taken"), [(PlainWeight, True), (int8, False)], ids=["plain", "int8"])
def test_plain_weights_alone_are_stacked(
    freeze: Callable[[Tensor], Any], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_grouped_products", lambda *_: True)
    own = experts(torch.bfloat16, biases=False, freeze=freeze)
    assert isinstance(grouped_where_it_can(own), GroupedExperts) is taken
