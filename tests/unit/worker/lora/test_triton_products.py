"""The Triton kernels in Triton's interpreter, beside plain autograd (more cases: tests/integration/worker)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlora_worker.lora.cpu import CpuProducts
from mlora_worker.runtime.kernel_compiler import launch
from tests.fixtures.group_cases import SMALL, Part, build, errors, products

OWN = Part(tokens=20, rank=17, members=(0, 2), dropout=0.3, seed=9)
MIXED = [Part(3, 1), Part(2, 0), OWN, Part(5, 3, (1,))]


def small_case(parts: Sequence[Part], dtype: torch.dtype = torch.float32) -> Any:
    return build(parts, inputs=20, outputs=(18, 5, 3), dtype=dtype)


def test_segments_of_ragged_ranks_members_and_dropout_equal_plain_autograd_and_themselves_alone() -> None:
    case = small_case(MIXED)
    found = case.run(products.TritonProducts(SMALL))
    assert max(errors(found, case.expected())) < 1e-6

    alone = small_case([OWN]).run(products.TritonProducts(SMALL))
    rows = case.segments[1].rows
    for one, other in zip(alone.outputs, found.outputs, strict=True):
        assert torch.equal(one, other[rows])
    assert alone.grad_x is not None
    assert found.grad_x is not None
    assert torch.equal(alone.grad_x, found.grad_x[rows])
    assert torch.equal(alone.grads_a[0], found.grads_a[1])
    for one, other in zip(alone.grads_b, found.grads_b[3:5], strict=True):
        assert torch.equal(one, other)


def test_a_task_with_other_ranks_for_some_modules_has_several_segments_on_the_same_rows() -> None:
    """They add to the same input gradient, so there is a round of launches for each."""
    parts = [
        Part(3, 1, (0, 1)),
        Part(20, 5, (0,), dropout=0.3, seed=9),
        Part(20, 17, (2,), dropout=0.3, seed=9, again=True),
        Part(20, 2, (1,), dropout=0.3, seed=9, again=True),
        Part(5, 3, (1, 2)),
    ]
    case = small_case(parts)
    found = case.run(products.TritonProducts(SMALL))
    assert max(errors(found, case.expected())) < 1e-6
    on_cpu = case.run(CpuProducts())  # the gradients' buffers go on being added to
    assert max(errors(on_cpu, found)[:4]) < 1e-6


def test_launches_do_not_grow_with_segments() -> None:
    def launches(parts: Sequence[Part]) -> int:
        count = 0

        def counted(*_: Any, **__: Any) -> None:
            nonlocal count
            count += 1

        build(parts).run(products.TritonProducts(launch=counted))
        return count

    assert (
        launches([Part(6, 4, dropout=0.1)])
        == launches([Part(2, rank, dropout=0.1) for rank in range(1, 9)])
        == 6
    )


@pytest.mark.parametrize("span", [16, 32, 64])
def test_long_sums_are_taken_in_spans(span: int) -> None:
    """Also where members have other numbers of spans than their neighbours, and none is filled."""
    kernels = []

    def noted(kernel: Any, *arguments: Any, **options: Any) -> None:
        kernels.append(kernel.fn.__name__)
        launch(kernel, *arguments, **options)

    case = small_case([Part(3, 1), replace(OWN, tokens=4)])
    found = case.run(products.TritonProducts(replace(SMALL, span=span), noted))
    assert kernels.count("add_spans_kernel") == (2 if span < 20 else 0)
    assert max(errors(found, case.expected())) < 1e-6


@pytest.mark.parametrize("wrong", ["type", "layout", "members"])
def test_what_kernels_would_misread_is_refused(wrong: str) -> None:
    case = build([Part(4, 2, (0,))])
    ours = products.TritonProducts(SMALL)
    if wrong == "type":
        with pytest.raises(TypeError, match="bfloat16"):
            ours.forward(case.x.bfloat16(), case.outputs, case.segments)
    elif wrong == "layout":
        with pytest.raises(ValueError, match="contiguous"):
            ours.forward(case.x, [y.T.contiguous().T for y in case.outputs], case.segments)
    else:
        with pytest.raises(ValueError, match="5 linear modules"):
            ours.prepare([[replace(case.segments[0], members=(4,))]])


def test_without_segments_nothing_is_done() -> None:
    case = build([Part(4, 0)])
    ours = products.TritonProducts(SMALL)
    (prepared,) = ours.prepare([case.segments])
    assert ours.forward(case.x, case.outputs, prepared) == ()
    ours.backward(case.x, case.upstream, case.grad_x, prepared, ())
