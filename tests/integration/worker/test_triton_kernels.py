"""The Triton kernels of the low-rank products beside plain autograd in many cases.

On a CPU they run in Triton's interpreter; with ``MLORA_TEST_DEVICE=cuda`` on a GPU, in the usual sizes of blocks, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.lora.function import GroupedLinears
from mlora_worker.lora.groups import GroupSegment
from mlora_worker.pipeline import engine as engine_module
from tests.fixtures.group_cases import SMALL, Part, build, errors, products
from tests.fixtures.interpreted import DEVICE
from tests.fixtures.stage_steps import engine_of, train

pytestmark = pytest.mark.integration

ON_GPU = DEVICE.type == "cuda"
SIZES: dict[str, Any] = {"small": SMALL} | ({"usual": None} if ON_GPU else {})
LIMIT = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}

CASES = {
    "ragged ranks": [Part(5, 1), Part(3, 3), Part(18, 16), Part(2, 20), Part(2, 64)],
    "dropout of some": [Part(20, 4, dropout=0.3), Part(3, 8), Part(7, 17, dropout=0.9)],
    "other members": [Part(18, 4, (1,)), Part(3, 5, (0, 2), dropout=0.2), Part(3, 2, (2,))],
    "gaps": [Part(2, 0), Part(17, 8), Part(4, 0), Part(3, 8, dropout=0.1), Part(6, 0)],
    "many chunks": [Part(70, 3, (0,), dropout=0.5), Part(40, 2, (0,))],
}
LARGE = {
    "eight tasks": [
        Part(700, 16, dropout=0.05),
        Part(1, 8),
        Part(333, 64, dropout=0.5),
        Part(64, 3),
        Part(1500, 16, (0, 2), dropout=0.1),
        Part(90, 128, (1,)),
        Part(2100, 1, dropout=0.05),
        Part(17, 20, dropout=0.9),
    ],
    "one task": [Part(4000, 16, dropout=0.05)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_it_equals_plain_autograd(name: str, size: str, dtype: torch.dtype) -> None:
    if not ON_GPU and dtype != torch.float32 and name != "dropout of some":
        pytest.skip("types take the interpreter the same way in every case")
    case = build(CASES[name], inputs=20, outputs=(18, 16, 5), dtype=dtype)
    found = case.run(products.TritonProducts(SIZES[size]))
    assert max(errors(found, case.expected())) < LIMIT[dtype]


@pytest.mark.skipif(not ON_GPU, reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_large_shapes_equal_plain_autograd_and_themselves(name: str, dtype: torch.dtype) -> None:
    case = build(LARGE[name], inputs=2048, outputs=(2048, 512, 512), dtype=dtype)
    ours = products.TritonProducts()
    expected, first = case.expected(), case.run(ours)
    assert max(errors(first, expected)) < LIMIT[dtype]
    for segment in case.segments:
        for grad in (segment.grad_a, *segment.grad_b):
            grad.fill_(1.0)
    for one, other in zip(first.tensors(), case.run(ours).tensors(), strict=True):
        assert torch.equal(one, other), "two runs differ"


def test_odd_sizes_of_a_single_module() -> None:
    case = build([Part(3, 5, (0,)), Part(18, 2, (0,), dropout=0.4)], inputs=7, outputs=(2,))
    assert max(errors(case.run(products.TritonProducts(SMALL)), case.expected())) < 2e-6


def test_without_an_input_gradient_the_rest_is_the_same() -> None:
    parts = [Part(18, 4, (0,), dropout=0.3), Part(3, 16, (0,))]
    with_it, without = (
        build(parts, inputs=20, outputs=(18,)).run(products.TritonProducts(SMALL), grad_x=wanted)
        for wanted in (True, False)
    )
    assert without.grad_x is None
    for one, other in zip(
        [*with_it.outputs, *with_it.grads_a, *with_it.grads_b], without.tensors(), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_neighbours_do_not_change_a_bit(dropout: float, size: str, dtype: torch.dtype) -> None:
    own = Part(37, 20, (0,), dropout=dropout, seed=9)
    shapes: dict[str, Any] = {"inputs": 20, "outputs": (18,), "dtype": dtype}
    if ON_GPU:
        own = Part(3000, 16, (0,), dropout=dropout, seed=9)
        shapes |= {"inputs": 2048, "outputs": (2048,)}
    alone = build([own], **shapes).run(products.TritonProducts(SIZES[size]))
    case = build(
        [Part(5, 3, (0,)), Part(3, 17, (0,), dropout=0.6), own, Part(1, 1, (0,), dropout=0.1)], **shapes
    )
    beside = case.run(products.TritonProducts(SIZES[size]))
    rows = case.segments[2].rows
    assert torch.equal(alone.outputs[0], beside.outputs[0][rows])
    assert alone.grad_x is not None
    assert beside.grad_x is not None
    assert torch.equal(alone.grad_x, beside.grad_x[rows])
    assert torch.equal(alone.grads_a[0], beside.grads_a[2])
    assert torch.equal(alone.grads_b[0], beside.grads_b[2])


def test_a_neighbour_that_is_not_finite_leaves_the_others_alone() -> None:
    def case() -> Any:
        return build(
            [Part(5, 4, (0,)), Part(20, 8, (0,), dropout=0.2), Part(7, 3, (0,))], inputs=20, outputs=(18,)
        )

    clean = case().run(products.TritonProducts(SMALL))
    bad = case()
    bad.x[:5] = torch.nan
    bad.upstream[0][25:] = torch.inf
    dirty = bad.run(products.TritonProducts(SMALL))
    assert dirty.outputs[0][:5].isnan().all()
    assert torch.equal(clean.outputs[0][5:25], dirty.outputs[0][5:25])
    assert torch.equal(clean.grads_a[1], dirty.grads_a[1])
    assert torch.equal(clean.grads_b[1], dirty.grads_b[1])


def test_gradients_add_up_over_microbatches() -> None:
    case = build([Part(18, 4, (0,), dropout=0.3)], inputs=20, outputs=(18,))
    ours = products.TritonProducts(SMALL)
    once, twice = case.run(ours), case.run(ours)
    torch.testing.assert_close(twice.grads_a[0] - 1, 2 * (once.grads_a[0] - 1))
    torch.testing.assert_close(twice.grads_b[0] - 1, 2 * (once.grads_b[0] - 1))


def test_within_the_function_it_equals_plain_autograd() -> None:
    """Frozen modules included, over a batch dimension, prepared together with another group."""
    case = build([Part(18, 4, dropout=0.3), Part(3, 16, (1,))], inputs=20, outputs=(18, 5, 3))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape[1], 20, generator=generator).to(DEVICE) for y in case.outputs]
    ours = products.TritonProducts(SMALL)
    other: list[GroupSegment] = []
    _, prepared = ours.prepare([other, case.segments])
    x = case.x[None].clone().requires_grad_()
    anchor = torch.zeros((), requires_grad=True)
    outputs = GroupedLinears.apply(x, anchor, ours, prepared, [*map(PlainWeight, weights)], [None] * 3)
    torch.autograd.backward(outputs, [grad[None] for grad in case.upstream])

    case.outputs = [case.x @ weight.T for weight in weights]
    case.grad_x = sum(
        (grad @ weight for grad, weight in zip(case.upstream, weights, strict=True)), torch.zeros_like(case.x)
    )
    expected = case.expected()
    assert x.grad is not None
    for own, wanted in zip([*outputs, x.grad], [*expected.outputs, expected.grad_x], strict=True):
        assert wanted is not None
        torch.testing.assert_close(own[0].double(), wanted, rtol=1e-5, atol=1e-4)
    for segment, grad in zip(case.segments, expected.grads_a, strict=True):
        torch.testing.assert_close(segment.grad_a.double(), grad, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(ON_GPU, reason="test_on_gpu.py has it")
def test_an_engine_trains_as_with_the_products_of_the_cpu(
    small_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = small_model("llama", num_hidden_layers=2)
    cpu = torch.device("cpu")
    losses, expected = train(engine_of(saved, cpu, torch.float32), 2)
    # An engine chooses by its device; here the device's choice is what must be tried without it.
    monkeypatch.setattr(engine_module, "products_for", lambda _: products.TritonProducts())
    found_losses, found = train(engine_of(saved, cpu, torch.float32), 2)
    for own, wanted in zip(found_losses, losses, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=0)
    for task, tensors in found.items():
        for name, tensor in tensors.items():
            assert (tensor - expected[task][name]).norm() <= 1e-3 * expected[task][name].norm(), name
