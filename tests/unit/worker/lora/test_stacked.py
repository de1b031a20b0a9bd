"""A and B of routed experts: where they lie while a task trains, and in files."""

from __future__ import annotations

import math

import pytest
import torch

from mlora_worker.lora.adapter import Adapter
from mlora_worker.lora.stacked import Stacked
from mlora_worker.protocol import InitialWeights

MODULE = "model.layers.1.mlp.experts"
BASE = f"base_model.model.{MODULE}"
EXPERTS, SIZE, WIDTH, RANK = 3, 10, 6, 2
STACKED = (
    Stacked(f"{MODULE}.gate_up_proj", f"{MODULE}.base_layer", EXPERTS, SIZE, 2 * WIDTH, RANK),
    Stacked(f"{MODULE}.down_proj", MODULE, EXPERTS, WIDTH, SIZE, RANK),
)
Q = "model.layers.1.self_attn.q_proj"


def adapter(dtype: torch.dtype = torch.float32, start: InitialWeights = InitialWeights.DEFAULT) -> Adapter:
    return Adapter(
        [{Q: (SIZE, 5)}],
        rank=RANK,
        seed=1,
        dtype=dtype,
        device=torch.device("cpu"),
        start=start,
        stacked=STACKED,
    )


def test_names_and_shapes_are_those_of_peft() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter().export().items()}
    assert {name: shape for name, shape in shapes.items() if "experts" in name} == {
        f"{BASE}.base_layer.lora_A.weight": (EXPERTS * RANK, SIZE),
        f"{BASE}.base_layer.lora_B.weight": (2 * WIDTH, RANK * EXPERTS),
        f"{BASE}.lora_A.weight": (EXPERTS * RANK, WIDTH),
        f"{BASE}.lora_B.weight": (SIZE, RANK * EXPERTS),
    }


def test_an_experts_matrices_are_those_that_peft_takes_from_its_files() -> None:
    own = adapter()
    with torch.no_grad():
        own.parameters.normal_(generator=torch.Generator().manual_seed(0))
    filed = own.export()
    for values, name in zip(own.stacked_values, (f"{BASE}.base_layer", BASE), strict=True):
        a, b = (filed[f"{name}.lora_{which}.weight"] for which in "AB")
        theirs_a, theirs_b = (
            a.reshape(EXPERTS, -1, a.shape[1]),
            b.reshape(len(b), -1, EXPERTS),
        )  # peft's own words
        for expert in range(EXPERTS):
            assert torch.equal(values.a[expert], theirs_a[expert])
            assert torch.equal(values.b[expert], theirs_b[..., expert])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_exported_is_restored(dtype: torch.dtype) -> None:
    own, other = adapter(dtype), adapter(dtype)
    with torch.no_grad():
        own.parameters.normal_(generator=torch.Generator().manual_seed(0))
    before = own.parameters.detach().clone()
    other.restore(own.export())
    assert torch.equal(own.parameters, before), "an export is a copy"
    masters = own.layout.stacked(own.parameters.detach())
    for mine, wanted in zip(other.stacked_values, masters, strict=True):
        assert torch.equal(mine.a, wanted.a.to(dtype))
        assert torch.equal(mine.b, wanted.b.to(dtype))
    for name, tensor in own.export().items():
        assert torch.equal(other.export()[name], tensor)


def test_all_a_lie_before_all_b() -> None:
    own = adapter()
    with torch.no_grad():
        own.parameters.zero_()
        own.parameters[: own.inward] = 1
    filed = own.export()
    assert all(bool(tensor.all()) == ("lora_A" in name) for name, tensor in filed.items())
    assert all(bool(tensor.any()) == ("lora_A" in name) for name, tensor in filed.items())


def test_each_expert_starts_as_peft_starts_a_module() -> None:
    filed = adapter().export()
    a = filed[f"{BASE}.base_layer.lora_A.weight"]
    assert a.abs().max() <= 1 / math.sqrt(SIZE)
    assert not any(tensor.any() for name, tensor in filed.items() if "lora_B" in name)
    wide = Stacked(f"{MODULE}.down_proj", MODULE, 16, 400, 8, 64)
    gaussian = Adapter(
        [], rank=[], seed=1, dtype=torch.float32, device=torch.device("cpu"), start=InitialWeights.GAUSSIAN,
        stacked=[wide],
    )  # fmt: skip
    assert gaussian.stacked_values[0].a.std().item() == pytest.approx(1 / 64, rel=0.02), (
        "of one expert's rank"
    )
    assert not torch.equal(gaussian.stacked_values[0].a[0], gaussian.stacked_values[0].a[1])
