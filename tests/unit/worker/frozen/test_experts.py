"""Routed experts: what they compute, and that a row's result has the same bits in any company."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softmax

from mlora_worker.frozen.experts import MOST_EXPERT_ROWS, CutRouter, FrozenExperts, SegmentTokens, _at_once
from mlora_worker.frozen.four_bits import nf4
from mlora_worker.frozen.int8 import int8
from mlora_worker.frozen.linear import Freeze
from mlora_worker.frozen.onednn import OneDnnWeight, available
from mlora_worker.frozen.plain import PlainWeight

EXPERTS, K, SIZE, WIDTH = 5, 2, 64, 96


def matrices(dtype: torch.dtype) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((WIDTH, SIZE), (WIDTH, SIZE), (SIZE, WIDTH))
    return [
        [torch.randn(shape, generator=generator).div_(6).to(dtype) for _ in range(EXPERTS)]
        for shape in shapes
    ]


def experts(dtype: torch.dtype, freeze: Freeze = PlainWeight) -> FrozenExperts:
    gate, up, down = ([freeze(one.clone()) for one in each] for each in matrices(dtype))
    return FrozenExperts(gate, up, down, lambda gate, up: silu(gate) * up, SegmentTokens())


class Router(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.randn(EXPERTS, SIZE, generator=torch.Generator().manual_seed(2)).to(dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        weights, chosen = softmax(logits, dim=-1).topk(K, dim=-1)
        return logits, weights, chosen


def by_autograd(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Every expert on every token, in plain autograd."""
    _, weights, chosen = Router(dtype)(hidden)
    gates, ups, downs = matrices(dtype)
    each = [
        (silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T
        for gate, up, down in zip(gates, ups, downs, strict=True)
    ]
    picked = torch.stack(each, dim=1).gather(1, chosen[..., None].expand(-1, -1, SIZE))
    y: Tensor = (picked * weights[..., None]).sum(dim=1)
    return y


def routed(module: FrozenExperts, hidden: Tensor) -> Tensor:
    _, weights, chosen = CutRouter(Router(hidden.dtype), module.segments)(hidden)
    y: Tensor = module(hidden, chosen, weights)
    return y


def with_gradient(module: FrozenExperts, rows: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    hidden = rows.clone().requires_grad_()
    y = routed(module, hidden)
    torch.autograd.backward(y, upstream)
    assert hidden.grad is not None
    return y.detach(), hidden.grad


def random(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("segments", [(), (7, 1, 9)], ids=["one task", "three"])
def test_outputs_and_gradients_through_router_and_experts_are_autograds(segments: tuple[int, ...]) -> None:
    hidden = random(17, 3, torch.float64).requires_grad_()
    upstream = random(17, 4, torch.float64)
    wanted = by_autograd(hidden, torch.float64)
    torch.autograd.backward(wanted, upstream)
    module = experts(torch.float64)
    module.segments.counts = segments
    y, grad = with_gradient(module, hidden.detach(), upstream)
    torch.testing.assert_close(y, wanted.detach())
    torch.testing.assert_close(grad, hidden.grad)


FREEZES: dict[str, Freeze] = {"plain": PlainWeight, "int8": int8, "nf4": partial(nf4, double=True)}
if available(torch.float32):
    FREEZES["oneDNN"] = OneDnnWeight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("freeze", FREEZES)
@pytest.mark.parametrize(
    "own", [1, 3, 10, 70, -70], ids=lambda own: f"{own} rows" if own > 0 else "in pieces"
)
def test_a_segment_has_the_bits_of_itself_alone(
    freeze: str, dtype: torch.dtype, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own < 0:
        monkeypatch.setattr("mlora_worker.frozen.experts.MOST_EXPERT_ROWS", 8)
        own = -own
    if freeze == "oneDNN" and not available(dtype):
        pytest.skip("oneDNN does not multiply this type here")
    module = experts(dtype, FREEZES[freeze])
    rows, upstream = random(own, 5, dtype), random(own, 6, dtype)
    alone = with_gradient(module, rows, upstream)
    for before, after in ((1, 0), (0, 2), (33, 5), (4, 160)):
        module.segments.counts = tuple(n for n in (before, own, after) if n)
        place = slice(before, before + own)
        company, beside = (
            torch.cat([random(before, seed, dtype), part, random(after, seed + 1, dtype)])
            for seed, part in ((7, rows), (9, upstream))
        )
        for found, wanted in zip(with_gradient(module, company, beside), alone, strict=True):
            assert torch.equal(found[place], wanted)
        module.segments.counts = ()


def test_rows_that_nobody_cuts_are_multiplied_together() -> None:
    """What the test above relies on: the products are those of whole segments."""
    seen: list[int] = []

    class Counting(PlainWeight):
        def multiplier(self, dtype: torch.dtype):  # type: ignore[no-untyped-def]
            inner = super().multiplier(dtype)

            class Watched:
                joins_rows = False

                def times(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
                    seen.append(len(x))
                    return inner.times(x, bias, out)

            return Watched()

    module = experts(torch.float32, Counting)
    chosen = torch.zeros(9, 1, dtype=torch.int64)
    module.segments.counts = (2, 7)
    module(random(9, 1), chosen, torch.ones(9, 1))
    assert seen == [2, 7] * 3
    seen.clear()
    module.segments.counts = ()
    module(random(9, 1), chosen, torch.ones(9, 1))
    assert seen == [9] * 3


def test_no_more_rows_of_an_expert_are_worked_on_at_a_time_than_a_bound() -> None:
    """However many tokens choose it; and what is cut, is cut by its own rows alone."""
    for counts in ((3, 0, 1000, 40, 250), (257,), (256, 256), (1, 255, 1)):
        groups = list(_at_once(counts))
        assert all(sum(rows for _, rows in parts) <= MOST_EXPERT_ROWS for parts in groups)
        own = [
            [rows for parts in groups for segment, rows in parts if segment == at]
            for at in range(len(counts))
        ]
        assert [sum(each) for each in own] == list(counts)
        for count, each in zip(counts, own, strict=True):
            alone = [rows for parts in _at_once((count,)) for _, rows in parts]
            assert each == alone


def test_experts_that_nobody_chose_cost_nothing() -> None:
    module = experts(torch.float32)
    for name in ("gate", "up", "down"):
        getattr(module, name)[3] = None
    chosen = torch.tensor([[0, 1], [4, 2]])
    assert module(random(2, 1), chosen, torch.ones(2, 2)).isfinite().all()
