"""VeRA's vectors and the matrices that they make: gradients, and what becomes of them between steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlora_worker.lora.adapter import Stack
from mlora_worker.lora.vera import VeraAdapter, projections, vera_keys

CPU = torch.device("cpu")
RANK = 3
GROUPS = [{"m": (5, 7), "n": (5, 2)}, {"o": (4, 6)}]  # no module has both of the longest sides
SIDES = {path: sides for group in GROUPS for path, sides in group.items()}


def adapter() -> VeraAdapter:
    a, b = projections(1, RANK, 5, 7)
    made = VeraAdapter(GROUPS, a, b, start=0.1, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(2)
    made.restore({name: torch.randn(one.shape, generator=generator) for name, one in made.export().items()})
    return made


def matrices(stacks: Sequence[Stack]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each module."""
    return {
        path: (stack.a[j * RANK : (j + 1) * RANK], stack.b[j])
        for group, stack in zip(GROUPS, stacks, strict=True)
        for j, path in enumerate(group)
    }


def receive(own: VeraAdapter, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """What a backward adds to the gradients of A and B."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for path, pair in matrices(own.gradients).items():
        a, b = (torch.randn(one.shape, generator=generator) for one in pair)
        pair[0].add_(a)
        pair[1].add_(b)
        found[path] = a, b
    return found


def test_the_vectors_multiply_the_rows_and_have_the_gradients_of_autograd() -> None:
    own = adapter()
    a, b = projections(1, RANK, 5, 7)
    vectors = {name: one.requires_grad_() for name, one in own.export().items()}
    upstream = receive(own, 3)
    total = torch.zeros(())
    for path, (made_a, made_b) in matrices(own.compute).items():
        inputs, outputs = SIDES[path]
        inward, outward = (vectors[name] for name in vera_keys(path))
        wanted = a[:, :inputs] * inward[:, None], b[:outputs] * outward[:, None]
        assert torch.equal(made_a, wanted[0])
        assert torch.equal(made_b, wanted[1])
        total = total + sum((one * back).sum() for one, back in zip(wanted, upstream[path], strict=True))
    torch.autograd.backward(total)
    norm = own.squared_norm()
    for name, found in own.named(own.gradient).items():
        torch.testing.assert_close(found, vectors[name].grad)
    torch.testing.assert_close(norm, own.gradient.double().square().sum())


def test_what_was_settled_is_not_counted_again() -> None:
    own = adapter()
    receive(own, 3)
    assert own.squared_norm() == own.squared_norm() > 0


def test_a_step_that_is_issued_again_has_nothing_of_its_first_try() -> None:
    own, fresh = adapter(), adapter()
    receive(own, 3)
    own.settle()
    receive(own, 4)
    own.forget_gradients()
    for one in (own, fresh):
        receive(one, 5)
        one.settle()
    assert torch.equal(own.gradient, fresh.gradient)
