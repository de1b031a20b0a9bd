"""Facts of a model and the resolution of target modules."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from mlora_worker.model.architecture import read_architecture
from mlora_worker.model.errors import (
    InvalidTarget,
    ModelError,
    TooManyStages,
    UnknownTargetModule,
    UnsupportedModel,
)
from mlora_worker.model.facts import model_facts, resolve_targets
from mlora_worker.protocol import FailureReason, LoRAConfig, ModelFacts

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def facts(small_model: Any) -> ModelFacts:
    return model_facts(small_model("llama", tie_word_embeddings=True).folder, 2, torch.bfloat16)


def lora(*targets: str, rank: int = 4) -> LoRAConfig:
    return LoRAConfig(rank=rank, target_modules=targets)


def test_facts_count_each_linear_module_once(facts: ModelFacts) -> None:
    assert sum(module.count for module in facts.modules) == 21
    assert {module.stage for module in facts.modules} == {0, 1}
    assert facts.dtype_bytes == 2


def test_facts_refuse_more_stages_than_layers(small_model: Any) -> None:
    with pytest.raises(TooManyStages):
        model_facts(small_model("llama").folder, 4, torch.float32)


def test_facts_that_no_report_may_have_are_refused_in_one_line(small_model: Any) -> None:
    folder = small_model("llama").folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 2**31}))
    with pytest.raises(UnsupportedModel) as caught:
        model_facts(folder, 1, torch.float32)
    assert str(caught.value) == (
        "config.json of the base model cannot be used: out_features: Input should be less than 2147483648"
    )


def test_facts_name_each_module_with_its_layers(facts: ModelFacts) -> None:
    (first,) = [module for module in facts.modules if module.name == "q_proj" and module.stage == 0]
    (second,) = [module for module in facts.modules if module.name == "q_proj" and module.stage == 1]
    assert first.path == "model.layers.*.self_attn.q_proj"
    assert first.inside == "self_attn.q_proj"
    layers = [*range(first.first_layer, first.first_layer + first.count)]
    layers += range(second.first_layer, second.first_layer + second.count)
    assert layers == [0, 1, 2]
    assert second.path_in(2) == "model.layers.2.self_attn.q_proj"


def test_modules_of_one_name_and_shape_in_one_layer_are_told_apart(small_model: Any) -> None:
    facts = model_facts(small_model("gpt2", n_inner=32).folder, 1, torch.float32)
    shapes = [(module.inside, module.count) for module in facts.modules if module.name == "c_proj"]
    assert shapes == [("attn.c_proj", 3), ("mlp.c_proj", 3)]


def test_all_linear_is_every_linear_module_of_the_layers(small_model: Any) -> None:
    saved = small_model("llama", tie_word_embeddings=True)
    facts = model_facts(saved.folder, 2, torch.float32)
    found = {target.path for target in resolve_targets(facts, lora("all-linear"))}
    assert found == {linear.path for linear in read_architecture(saved.folder).linears}
    assert {path.rpartition(".")[2] for path in found} == set(ALL)


@pytest.mark.parametrize(
    ("targets", "error", "reason"),
    [
        (("qproj",), UnknownTargetModule, FailureReason.UNKNOWN_TARGET_MODULE),
        (("q_proj", "all-linear"), InvalidTarget, FailureReason.INVALID_SPEC),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(
    facts: ModelFacts, targets: tuple[str, ...], error: type[ModelError], reason: FailureReason
) -> None:
    with pytest.raises(error) as caught:
        resolve_targets(facts, lora(*targets))
    assert caught.value.reason is reason
