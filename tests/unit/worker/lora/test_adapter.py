"""One task's parameters on one stage."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model

from mlora_worker.lora.adapter import Adapter, expected_keys, initial_weights
from mlora_worker.protocol import InitialWeights
from mlora_worker.stream.footprint import NORM_AT_ONCE

CPU = torch.device("cpu")
Q0, V1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"


def adapter(*paths: str, dtype: torch.dtype = torch.float32, seed: int = 1) -> Adapter:
    sizes = {Q0: (5, 7), V1: (5, 3)}
    return Adapter([{path: sizes[path]} for path in paths], rank=2, seed=seed, dtype=dtype, device=CPU)


def test_names_are_those_of_peft_with_global_layer_indices() -> None:
    assert expected_keys([V1, Q0]) == (
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
        "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight",
        "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight",
    )
    exported = adapter(Q0, V1).export()
    assert sorted(exported) == list(expected_keys([Q0, V1]))
    assert [list(tensor.shape) for tensor in exported.values()] == [[2, 5], [7, 2], [2, 5], [3, 2]]


def test_a_module_starts_the_same_on_any_stage_and_beside_any_other() -> None:
    whole = adapter(Q0, V1).export()
    parts = adapter(V1).export() | adapter(Q0).export()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_other_seeds_and_other_modules_start_elsewhere() -> None:
    a, _ = initial_weights(Q0, 1, 2, 5, 7)
    assert not torch.equal(a, initial_weights(Q0, 2, 2, 5, 7)[0])
    assert not torch.equal(a, initial_weights(V1, 1, 2, 5, 7)[0])


def test_the_start_is_that_of_peft() -> None:
    a, b = initial_weights(Q0, 1, 64, 400, 7)
    assert b is None
    bound = 1 / math.sqrt(400)  # Kaiming uniform with a = sqrt 5
    assert a.abs().max() <= bound
    assert a.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not any(tensor.any() for name, tensor in adapter(Q0, V1).export().items() if "lora_B" in name)


def test_a_gaussian_start_has_the_deviation_that_it_has_in_peft() -> None:
    a, _ = initial_weights(Q0, 1, 64, 400, 7, InitialWeights.GAUSSIAN)
    assert a.std().item() == pytest.approx(1 / 64, rel=0.02)
    assert a.abs().max() > 3 / 64
    made = Adapter(
        [{Q0: (5, 7)}], rank=2, seed=1, dtype=torch.float32, device=CPU, start=InitialWeights.GAUSSIAN
    )
    name_a, name_b = expected_keys([Q0])
    assert torch.equal(made.export()[name_a], initial_weights(Q0, 1, 2, 5, 7, InitialWeights.GAUSSIAN)[0])
    assert not made.export()[name_b].any()


def test_an_orthogonal_start_is_distributed_as_in_peft_and_changes_nothing() -> None:
    a, b = initial_weights(Q0, 1, 16, 300, 200, InitialWeights.ORTHOGONAL)
    assert b is not None
    torch.manual_seed(0)
    theirs = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(300, 200, bias=False)),
        LoraConfig(r=16, target_modules=["0"], init_lora_weights="orthogonal"),
    ).base_model.model[0]
    for mine, own in ((a, theirs.lora_A), (b, theirs.lora_B)):
        other = own["default"].weight.detach()
        assert mine.std().item() == pytest.approx(other.std().item(), rel=0.05)
        assert torch.linalg.matrix_rank(mine) == torch.linalg.matrix_rank(other) == 8
    assert (b @ a).abs().max() < 1e-5 * (b.norm(dim=1).max() * a.norm(dim=0).max())
    made = Adapter(
        [{Q0: (5, 7)}], rank=4, seed=1, dtype=torch.float32, device=CPU, start=InitialWeights.ORTHOGONAL
    )
    wanted = initial_weights(Q0, 1, 4, 5, 7, InitialWeights.ORTHOGONAL)
    for name, tensor in zip(expected_keys([Q0]), wanted, strict=True):
        assert tensor is not None
        assert torch.equal(made.export()[name], tensor)


def test_groups_may_have_ranks_of_their_own() -> None:
    k = Q0.replace("q_proj", "k_proj")
    made = Adapter([{Q0: (5, 7)}, {k: (5, 3)}], rank=[2, 4], seed=1, dtype=torch.float32, device=CPU)
    shapes = {name: tuple(tensor.shape) for name, tensor in made.export().items()}
    assert [shapes[name] for name in expected_keys([Q0])] == [(2, 5), (7, 2)]
    assert [shapes[name] for name in expected_keys([k])] == [(4, 5), (3, 4)]


def test_an_export_is_a_copy() -> None:
    own = adapter(Q0)
    before = own.export()
    with torch.no_grad():
        own.parameters.add_(1.0)
    assert not any(torch.equal(before[name], now) for name, now in own.export().items())


def test_products_see_the_masters_in_the_type_of_the_base() -> None:
    own = adapter(Q0, dtype=torch.bfloat16)
    with torch.no_grad():
        own.parameters.add_(1.0)
    own.refresh()
    assert own.compute[0].b[0].dtype == torch.bfloat16
    assert torch.equal(own.compute[0].b[0].float(), torch.ones(7, 2))
    assert own.bytes == own.parameters.numel() * (4 + 4 + 2)


def test_the_squared_norm_counts_every_gradient_once() -> None:
    own = adapter(Q0, V1)
    for stack in own.gradients:
        stack.a.fill_(2.0)
        for b in stack.b:
            b.fill_(1.0)
    assert own.squared_norm().item() == 4 * (10 + 10) + 14 + 6


def test_the_squared_norm_of_many_gradients_is_that_of_float64() -> None:
    """In more than one part, the last of which is shorter."""
    shapes = {"layers.0.wide": (4000, 100)}
    own = Adapter([shapes], rank=20, seed=1, dtype=torch.float32, device=CPU)
    own.gradient.copy_(torch.randn(own.gradient.numel(), generator=torch.Generator().manual_seed(0)))
    assert own.gradient.numel() % NORM_AT_ONCE
    assert own.gradient.numel() > NORM_AT_ONCE
    wanted = own.gradient.double().square().sum().item()
    assert own.squared_norm().item() == pytest.approx(wanted, rel=1e-14)


def test_modules_that_share_their_input_lie_one_below_the_other() -> None:
    k, v = Q0.replace("q_proj", "k_proj"), Q0.replace("q_proj", "v_proj")
    own = Adapter(
        [{Q0: (5, 7), k: (5, 3), v: (5, 3)}, {V1: (5, 3)}], rank=2, seed=1, dtype=torch.float32, device=CPU
    )
    stack = own.compute[0]
    assert stack.a.shape == (6, 5)
    assert stack.a.is_contiguous()
    exported = own.export()
    for j, path in enumerate((Q0, k, v)):
        name_a, name_b = expected_keys([path])
        assert torch.equal(exported[name_a], stack.a[2 * j : 2 * j + 2])
        assert torch.equal(exported[name_a], initial_weights(path, 1, 2, 5, 7)[0])
        assert exported[name_b].shape == stack.b[j].shape
