"""Which parameters of routed experts a LoRAConfig adapts; that PEFT loads the same: tests/equivalence."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_worker.protocol import ExpertShape, FailureReason, LoRAConfig, is_parameter
from mlora_worker.stream.footprint import dense_numbers, exact_parts, input_groups
from mlora_worker.stream.targets import Misfit, kept_of, published_names, ranks_of, targets_of
from tests.fixtures.toy_facts import toy_facts

PATH = "model.layers.*.mlp.experts"
EXPERTS = (
    ExpertShape(stage=0, first_layer=1, count=1, experts=8, active=2, width=16, in_peft=("gate_proj",), path=PATH),
    ExpertShape(stage=1, first_layer=2, count=2, experts=8, active=2, width=16, in_peft=("gate_proj",), path=PATH),
)  # fmt: skip
FACTS = toy_facts().model_copy(update={"experts": EXPERTS})
BOTH = ("experts.gate_up_proj", "mlp.experts.down_proj")


def lora(*parameters: str, **options: Any) -> LoRAConfig:
    return LoRAConfig(**{"rank": 4, "target_modules": (), "target_parameters": parameters, **options})


def stacked(*names: str, layers: Any = (1, 2, 3)) -> list[str]:
    return [f"model.layers.{layer}.mlp.experts.{name}" for layer in layers for name in names]


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        (("experts.down_proj",), stacked("down_proj")),
        (("down_proj",), stacked("down_proj")),
        (BOTH, stacked("gate_up_proj", "down_proj")),
        (("layers.2.mlp.experts.gate_up_proj",), stacked("gate_up_proj", layers=(2,))),
    ],
)
def test_an_entry_is_the_end_of_a_path(entries: tuple[str, ...], found: list[str]) -> None:
    assert [target.path for target in targets_of(FACTS, lora(*entries))] == found


def test_modules_and_parameters_come_layer_by_layer() -> None:
    both = targets_of(FACTS, lora(*BOTH, target_modules=("q_proj",)))
    layers = [target.module.layer for target in both]
    assert layers == sorted(layers)
    own = [target.module.name for target in both if target.module.layer == 1]
    assert own == ["q_proj", "q_proj", "gate_up_proj", "down_proj"], "of both stages of the toy"


def test_each_expert_has_an_a_and_a_b_of_the_rank() -> None:
    gate_up, down = targets_of(FACTS, lora(*BOTH))[:2]
    assert (gate_up.rows, down.rows) == (32, 32)
    assert gate_up.parameters == 8 * 4 * (64 + 2 * 16)
    assert down.parameters == 8 * 4 * (16 + 64)


def test_names_in_files_say_whether_both_are_adapted() -> None:
    both, down = targets_of(FACTS, lora(*BOTH))[:2], targets_of(FACTS, lora(BOTH[1]))[0]
    module = "model.layers.1.mlp.experts"
    assert [target.file_path for target in both] == [f"{module}.base_layer", module]
    assert down.file_path == module
    alone = targets_of(FACTS, lora(BOTH[0], "layers.2.mlp.experts.down_proj"))
    paths = {
        target.module.layer: target.file_path for target in alone if target.module.name == "gate_up_proj"
    }
    assert paths == {1: module, 2: "model.layers.2.mlp.experts.base_layer", 3: "model.layers.3.mlp.experts"}


def test_published_names_are_the_shortest_that_mean_them() -> None:
    def names(*entries: str, **options: Any) -> tuple[str, ...]:
        return published_names(FACTS, targets_of(FACTS, lora(*entries, **options)))

    assert names(*BOTH, target_modules=("q_proj",)) == (
        "mlp.experts.down_proj", "mlp.experts.gate_up_proj", "q_proj",
    )  # fmt: skip
    assert names("layers.2.mlp.experts.down_proj") == ("model.layers.2.mlp.experts.down_proj",)
    assert [is_parameter(name) for name in names(*BOTH, target_modules=("q_proj",))] == [True, True, False]
    assert not is_parameter("mlp.shared_experts.down_proj")


def test_figures_of_their_own_are_by_path_too() -> None:
    found = ranks_of(FACTS, lora(*BOTH, target_modules=("q_proj",), rank_pattern={"down_proj": 2}))
    assert {path.rpartition(".")[2]: rank for path, rank in found.items()} == {
        "q_proj": 4, "gate_up_proj": 4, "down_proj": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("mlp.gate.weight", "the router gets no adapter"),
        ("mlp.router", "the router gets no adapter"),
        ("q_proj.weight", "a linear module belongs in targetModules"),
        ("experts.gate_proj", "gate and up of all experts are one parameter"),
        (r".*\.down_proj", "patterns are not possible here"),
        ("layers.0.mlp.experts.down_proj", "is not a parameter"),
    ],
)
def test_what_is_none_is_refused_with_those_that_there_are(entry: str, told: str) -> None:
    with pytest.raises(Misfit, match=told) as refused:
        targets_of(FACTS, lora("down_proj", entry))
    assert refused.value.reason is FailureReason.UNKNOWN_TARGET_MODULE
    assert str(refused.value).endswith("there are mlp.experts.gate_up_proj, mlp.experts.down_proj")


def test_a_model_without_experts_and_a_worker_that_tells_no_path_are_refused() -> None:
    with pytest.raises(Misfit, match="has no routed experts; remove it"):
        targets_of(toy_facts(), lora("down_proj"))
    nameless = tuple(shape.model_copy(update={"path": None}) for shape in EXPERTS)
    with pytest.raises(Misfit, match="former version"):
        targets_of(FACTS.model_copy(update={"experts": nameless}), lora("down_proj"))


def test_a_rank_above_the_smaller_side_is_refused() -> None:
    words = "rank 17 is larger than the smaller side of down_proj .*, or remove it from targetParameters$"
    with pytest.raises(Misfit, match=words):
        targets_of(FACTS, lora("down_proj", rank=17))


@pytest.mark.parametrize("entry", ["experts.down_proj", "layers.2.mlp.experts"])
def test_experts_are_not_excluded_but_named(entry: str) -> None:
    with pytest.raises(Misfit, match="is of the routed experts, of which only those in targetParameters"):
        targets_of(FACTS, lora(*BOTH, target_modules=("q_proj",), exclude_modules=(entry,)))


def test_on_a_quantised_base_one_matrix_of_an_expert_is_dense_at_a_time() -> None:
    for groups in ((), (("q_proj", "k_proj"), ("o_proj",))):
        assert dense_numbers(FACTS, 1, groups) == dense_numbers(toy_facts(), 1, groups)
    wide = FACTS.model_copy(
        update={"experts": tuple(one.model_copy(update={"width": 1024}) for one in EXPERTS)}
    )
    assert dense_numbers(wide, 1, (("q_proj",),)) == FACTS.hidden_size * 1024


def test_a_token_leaves_low_rank_activations_in_each_expert_that_it_goes_through() -> None:
    asked = lora(*BOTH, target_modules=("q_proj",))
    kept = kept_of(FACTS, asked)
    assert kept["model.layers.1.mlp.experts.down_proj"] == 2 * 4
    assert kept["layers.1.q_proj"] == 4
    groups = input_groups(FACTS, 0)
    assert [group.paths for group in groups if group.layer == 1][-2:] == [(path,) for path in stacked(
        "gate_up_proj", "down_proj", layers=(1,)
    )]  # fmt: skip
    exact, last = exact_parts([(kept, 10)], 10, groups, input_bytes=4, low_bytes=4)
    # q of both layers, and of the second what goes into gate and up, and low-rank activations of both parameters.
    assert exact == 10 * 4 * (2 * (64 + 4) + 64 + 2 * 8)
    assert last == 10 * 4 * 8
