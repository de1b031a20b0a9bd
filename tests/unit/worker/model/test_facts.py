"""Facts of a model and the resolution of target modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlora_worker.model.architecture import read_architecture
from mlora_worker.model.errors import InvalidTarget, TooManyStages, UnknownTargetModule
from mlora_worker.model.facts import model_facts, resolve_targets, target_linears
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


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (("v_proj", "q_proj"), ("q_proj", "v_proj")),
        (("q_proj", "q_proj"), ("q_proj",)),
        (("all-linear",), ALL),
        (("down_proj",), ("down_proj",)),
    ],
)
def test_names_are_resolved(facts: ModelFacts, asked: tuple[str, ...], found: tuple[str, ...]) -> None:
    assert resolve_targets(facts, lora(*asked)) == found


@pytest.mark.parametrize(
    "wrong", ["qproj", "c_attn", "lm_head", "embed_tokens", r".*layers\.[0-3]\..*q_proj", "norm"]
)
def test_a_name_that_matches_nothing_is_told_with_the_real_ones(facts: ModelFacts, wrong: str) -> None:
    with pytest.raises(UnknownTargetModule) as caught:
        resolve_targets(facts, lora("q_proj", wrong))
    assert caught.value.reason is FailureReason.UNKNOWN_TARGET_MODULE
    assert f"targetModules: {wrong} is" in str(caught.value)
    assert all(name in str(caught.value) for name in ALL)


def test_all_linear_stands_alone(facts: ModelFacts) -> None:
    with pytest.raises(InvalidTarget, match="stands alone"):
        resolve_targets(facts, lora("q_proj", "all-linear"))


def test_a_rank_above_the_smaller_side_of_a_module_is_refused(facts: ModelFacts) -> None:
    assert resolve_targets(facts, lora("q_proj", rank=32)) == ("q_proj",)
    with pytest.raises(InvalidTarget, match=r"k_proj \(32 x 16\): use at most 16"):
        resolve_targets(facts, lora("q_proj", "k_proj", rank=17))


def test_target_linears_are_those_of_the_whole_model(small_model: Any) -> None:
    architecture = read_architecture(small_model("llama").folder)
    paths = [linear.path for linear in target_linears(architecture, ("o_proj",))]
    assert paths == [f"model.layers.{i}.self_attn.o_proj" for i in range(3)]
