"""Which modules a LoRAConfig adapts; that PEFT loads the same: tests/equivalence."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.protocol import FailureReason, LoRAConfig, ModelFacts, ModuleShape
from mlora_worker.stream.targets import Misfit, modules_of, published_names, ranks_of, targets_of

LAYERS = 4
SHAPES = {
    "attn.c_attn": (32, 96), "attn.c_proj": (32, 32), "mlp.c_fc": (32, 48), "mlp.c_proj": (48, 32),
}  # fmt: skip
FACTS = ModelFacts(
    hidden_size=32,
    intermediate_size=48,
    layers=LAYERS,
    attention_heads=4,
    vocab_size=97,
    max_positions=64,
    dtype_bytes=4,
    modules=tuple(
        ModuleShape(
            stage=stage,
            name=inside.rpartition(".")[2],
            in_features=inputs,
            out_features=outputs,
            count=LAYERS // 2,
            path=f"h.*.{inside}",
            first_layer=stage * LAYERS // 2,
        )
        for stage in (0, 1)
        for inside, (inputs, outputs) in SHAPES.items()
    ),
)


def paths(**config: Any) -> list[str]:
    return [target.path for target in targets_of(FACTS, LoRAConfig(rank=4, **config))]


def every(*insides: str, layers: Any = range(LAYERS)) -> list[str]:
    """Layer by layer, in a layer's own order."""
    return [f"h.{layer}.{inside}" for layer in layers for inside in SHAPES if inside in insides]


@pytest.mark.parametrize(
    ("story", "config", "found"),
    [
        ("a name", {"target_modules": ("c_attn",)}, every("attn.c_attn")),
        ("twice is once", {"target_modules": ("c_fc", "c_fc", "mlp.c_fc")}, every("mlp.c_fc")),
        (
            "a name that two modules of a layer have",
            {"target_modules": ("c_proj",)},
            every("attn.c_proj", "mlp.c_proj"),
        ),
        ("the end of a path", {"target_modules": ("attn.c_proj",)}, every("attn.c_proj")),
        ("a whole path", {"target_modules": ("h.3.mlp.c_fc",)}, ["h.3.mlp.c_fc"]),
        ("a pattern beside a name", {"target_modules": (r"h\.[01]\.mlp\..*", "c_attn")}, None),
        ("all of them", {"target_modules": ("all-linear",)}, every(*SHAPES)),
        (
            "without some",
            {"target_modules": ("all-linear",), "exclude_modules": ("mlp.c_proj", r".*\.0\..*")},
            every("attn.c_attn", "attn.c_proj", "mlp.c_fc", layers=(1, 2, 3)),
        ),
        (
            "in some layers",
            {"target_modules": ("all-linear",), "layers_to_transform": (3, 1, 1)},
            every(*SHAPES, layers=(1, 3)),
        ),
        (
            "all three",
            {
                "target_modules": ("c_proj",),
                "exclude_modules": ("h.2.mlp.c_proj",),
                "layers_to_transform": (2,),
            },
            ["h.2.attn.c_proj"],
        ),
    ],
)
def test_modules_are_chosen_layer_by_layer(
    story: str, config: dict[str, Any], found: list[str] | None
) -> None:
    if found is None:
        assert set(paths(**config)) == {
            *every("attn.c_attn"),
            *every("mlp.c_fc", "mlp.c_proj", layers=(0, 1)),
        }, story
        return
    assert paths(**config) == found, story


@pytest.mark.parametrize(
    ("story", "config", "told"),
    [
        (
            "a typo beside a good name",
            {"target_modules": ("c_fc", "c_atn")},
            "targetModules: c_atn is .* did you mean c_attn",
        ),
        (
            "another model's names",
            {"target_modules": ("q_proj",)},
            "q_proj is not a linear module .* there are c_attn, c_proj, c_fc",
        ),
        (
            "the head",
            {"target_modules": ("lm_head",)},
            "lm_head .*the head and the embeddings never get an adapter",
        ),
        ("the embeddings", {"target_modules": ("wte",)}, "for new tokens train the base.s embeddings first"),
        ("a norm", {"target_modules": ("ln_1",)}, "ln_1 is not a linear module"),
        ("half of a name", {"target_modules": ("proj",)}, "proj is not a linear module"),
        ("a layer", {"target_modules": ("h.0",)}, "h.0 is not a linear module"),
        (
            "a pattern without its path",
            {"target_modules": ("c_(fc|attn)",)},
            "a pattern must match a whole path such as h.0.attn.c_attn",
        ),
        (
            "a broken pattern",
            {"target_modules": ("*.c_fc",)},
            "targetModules: \\*.c_fc is not a valid pattern: \\* has nothing to repeat",
        ),
        (
            "all beside others",
            {"target_modules": ("all-linear", "c_fc")},
            "all-linear must be the only entry",
        ),
        (
            "nothing to exclude",
            {"target_modules": ("c_fc",), "exclude_modules": ("c_attn",)},
            "c_attn has no effect",
        ),
        (
            "nothing of that name",
            {"target_modules": ("c_fc",), "exclude_modules": ("c_ffc",)},
            "excludeModules: c_ffc is .* did you mean c_fc",
        ),
        (
            "all excluded",
            {"target_modules": ("c_fc",), "exclude_modules": ("mlp.c_fc",)},
            "excludes all of targetModules",
        ),
        (
            "a layer beyond the last",
            {"target_modules": ("c_fc",), "layers_to_transform": (1, 4)},
            "layersToTransform: 4 is not a layer .* has 4, numbered from 0",
        ),
        (
            "a name outside those layers",
            {"target_modules": ("c_fc", "h.0.attn.c_attn"), "layers_to_transform": (1,)},
            "h.0.attn.c_attn matches no module of the layers",
        ),
        (
            "a rank of nothing",
            {"target_modules": ("c_fc",), "rank_pattern": {"c_attn": 2}},
            "rankPattern: c_attn is no",
        ),
        (
            "an alpha of nothing",
            {"target_modules": ("c_fc",), "alpha_pattern": {"c_attn": 2}},
            "alphaPattern: c_attn is no",
        ),
        (
            "ranks that disagree",
            {"target_modules": ("c_fc",), "rank_pattern": {"c_fc": 2, "h.1.*": 3}},
            "rankPattern: c_fc and h.1.\\* disagree about h.1.mlp.c_fc",
        ),
        (
            "a rank above the smaller side",
            {"target_modules": ("c_fc",), "rank_pattern": {"c_fc": 33}},
            r"rank 33 is larger than the smaller side of c_fc \(32 x 48\): use at most 32",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_what_there_is(story: str, config: dict[str, Any], told: str) -> None:
    with pytest.raises(Misfit) as caught:
        paths(**config)
    assert re.search(told, str(caught.value)), story


def test_unknown_names_and_wrong_figures_have_different_reasons() -> None:
    for config, reason in (
        ({"target_modules": ("nope",)}, FailureReason.UNKNOWN_TARGET_MODULE),
        ({"target_modules": ("c_fc",), "rank_pattern": {"c_fc": 33}}, FailureReason.INVALID_SPEC),
    ):
        with pytest.raises(Misfit) as caught:
            paths(**config)
        assert caught.value.reason is reason


def test_patterns_give_modules_ranks_and_alphas_of_their_own() -> None:
    lora = LoRAConfig(
        rank=4,
        alpha=8,
        target_modules=("c_fc", "c_attn"),
        rank_pattern={"c_attn": 2, r"[12]\.mlp\.c_fc": 16},
        alpha_pattern={"h.3.mlp.c_fc": 1.5, "h.3.attn.*": 3},
    )
    found = {target.path: (target.rank, target.alpha, target.scale) for target in targets_of(FACTS, lora)}
    assert found["h.0.mlp.c_fc"] == (4, 8, 2)
    assert found["h.1.mlp.c_fc"] == found["h.2.mlp.c_fc"] == (16, 8, 0.5)
    assert found["h.3.mlp.c_fc"] == (4, 1.5, 0.375)
    assert found["h.0.attn.c_attn"] == (2, 8, 4)
    assert found["h.3.attn.c_attn"] == (2, 3, 1.5)
    assert ranks_of(FACTS, lora) == {path: figures[0] for path, figures in found.items()}


def test_rslora_divides_by_the_root_of_each_modules_own_rank() -> None:
    lora = LoRAConfig(
        rank=4, alpha=8, target_modules=("c_fc", "c_attn"), rank_pattern={"c_attn": 9}, use_rslora=True
    )
    scales = {target.module.name: target.scale for target in targets_of(FACTS, lora)}
    assert scales == {"c_fc": 8 / 2, "c_attn": pytest.approx(8 / math.sqrt(9))}


@given(st.sets(st.sampled_from([module.path for module in modules_of(FACTS)]), min_size=1))
def test_published_names_match_the_adapted_modules_and_no_others(chosen: set[str]) -> None:
    lora = LoRAConfig(rank=4, target_modules=tuple(sorted(chosen)))
    names = published_names(FACTS, targets_of(FACTS, lora))
    matched = {
        module.path
        for module in modules_of(FACTS)
        if any(module.path == name or module.path.endswith(f".{name}") for name in names)
    }
    assert matched == chosen


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"target_modules": ("all-linear",)}, ("c_attn", "c_fc", "c_proj")),
        ({"target_modules": ("attn.c_proj",)}, ("attn.c_proj",)),
        ({"target_modules": (r"h\.0\.attn.*",)}, ("h.0.attn.c_attn", "h.0.attn.c_proj")),
    ],
)
def test_published_names_are_as_short_as_they_can_be(config: dict[str, Any], names: tuple[str, ...]) -> None:
    assert published_names(FACTS, targets_of(FACTS, LoRAConfig(rank=4, **config))) == names


def test_a_config_that_does_not_fit_is_counted_by_what_it_names() -> None:
    """The memory of a task is asked for before anybody has refused it."""
    lora = LoRAConfig(rank=4, target_modules=("c_fc", "nope", ".*x"))
    assert ranks_of(FACTS, lora) == dict.fromkeys(every("mlp.c_fc"), 4)


def test_all_linear_may_meet_a_module_that_is_narrower_than_the_rank() -> None:
    """Such as the gate of a shared expert, which has one output; who names it is told."""
    assert {
        target.rank for target in targets_of(FACTS, LoRAConfig(rank=33, target_modules=("all-linear",)))
    } == {33}
    with pytest.raises(Misfit, match="rank 33 is larger than the smaller side of c_fc"):
        targets_of(FACTS, LoRAConfig(rank=33, target_modules=("c_fc",)))


OUTSIDE = ModuleShape(
    stage=0,
    name="per_layer_projection",
    in_features=32,
    out_features=64,
    count=1,
    path="h.per_layer_projection",
)
NUMBERED = OUTSIDE.model_copy(update={"name": "1", "path": "h.altup_projections.1"})


@pytest.mark.parametrize(
    ("asked", "reason", "told"),
    [
        (
            "all-linear",
            FailureReason.INVALID_SPEC,
            r"all-linear adapts per_layer_projection, altup_projections of this model, .* such as \[c_attn, c_proj, ",
        ),
        (
            "per_layer_projection",
            FailureReason.UNKNOWN_TARGET_MODULE,
            "per_layer_projection is not a linear module of .*per_layer_projection, altup_projections gets no adapter",
        ),
    ],
)
def test_modules_that_are_the_same_for_all_tasks_are_refused_with_what_to_write(
    asked: str, reason: FailureReason, told: str
) -> None:
    facts = FACTS.model_copy(update={"never_adapted": (OUTSIDE, NUMBERED)})
    with pytest.raises(Misfit) as caught:
        targets_of(facts, LoRAConfig(target_modules=(asked,)))
    assert caught.value.reason is reason
    assert re.search(told, str(caught.value))
    assert targets_of(facts, LoRAConfig(target_modules=("c_fc",)))
