"""Bytes of a stage: exact for adapters, monotone for everything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.memory.learned import learn, to_status
from mlora_operator.memory.model import (
    Demand,
    MemoryModel,
    adapter_bytes,
    demand_of,
    dense_bytes,
    prior,
    stage_need,
    worst_case,
)
from mlora_operator.memory.reckoning import reckonings
from mlora_worker.protocol import (
    BorderShape,
    LoRAConfig,
    MemoryExhausted,
    ModelFacts,
    ModuleShape,
    Optimizer,
    OptimizerType,
    StageReport,
    Training,
)
from mlora_worker.stream.footprint import UNPACKING_BYTES

HIDDEN, INTER, LAYERS = 64, 128, 6


def modules(stage: int, count: int) -> tuple[ModuleShape, ...]:
    return (
        ModuleShape(stage=stage, name="q_proj", in_features=HIDDEN, out_features=HIDDEN, count=count),
        ModuleShape(stage=stage, name="down_proj", in_features=INTER, out_features=HIDDEN, count=count),
    )


FACTS = ModelFacts(
    hidden_size=HIDDEN,
    intermediate_size=INTER,
    layers=LAYERS,
    attention_heads=4,
    vocab_size=1000,
    max_positions=256,
    dtype_bytes=4,
    modules=modules(0, 4) + modules(1, 2),
)
STAGES = (
    StageReport(
        stage=0, first_layer=0, last_layer=3, device="cpu", resident_bytes=10_000_000, capacity_bytes=2**30
    ),
    StageReport(
        stage=1, first_layer=4, last_layer=5, device="cpu", resident_bytes=5_000_000, capacity_bytes=2**30
    ),
)


@pytest.mark.parametrize(
    ("story", "lora", "stage", "parameters"),
    [
        ("one module, four layers", LoRAConfig(rank=8, target_modules=("q_proj",)), 0, 8 * (64 + 64) * 4),
        (
            "another shape, two layers",
            LoRAConfig(rank=4, target_modules=("down_proj",)),
            1,
            4 * (128 + 64) * 2,
        ),
        (
            "all-linear is every module",
            LoRAConfig(rank=1, target_modules=("all-linear",)),
            1,
            (64 + 64) * 2 + (128 + 64) * 2,
        ),
        ("a name that the model lacks takes nothing", LoRAConfig(target_modules=("c_attn",)), 0, 0),
    ],
)
def test_an_adapter_takes_four_float32_numbers_a_parameter_of_matrices_that_start_on_a_cache_line(
    story: str, lora: LoRAConfig, stage: int, parameters: int
) -> None:
    assert adapter_bytes(lora, FACTS, stage) == parameters * 16, story
    half = FACTS.model_copy(update={"dtype_bytes": 2})
    assert adapter_bytes(lora, half, stage) == parameters * 18, "and a copy in the base's type"
    assert adapter_bytes(lora, half, stage, moments=1) == parameters * 14, "and Lion one number less"


def demand(rank: int = 8, rows: int = 4, longest: int = 32) -> Demand:
    return Demand(LoRAConfig(rank=rank), rows * longest, longest)


def test_rows_are_never_longer_than_the_model_takes() -> None:
    training = Training(batch_size=2, gradient_accumulation_steps=3, max_seq_length=1000)
    assert demand_of(LoRAConfig(), training, max_positions=256) == Demand(LoRAConfig(), 6 * 256, 256)
    lion = training.model_copy(update={"optimizer": Optimizer(type=OptimizerType.LION)})
    assert demand_of(LoRAConfig(), lion, max_positions=256) == Demand(LoRAConfig(), 6 * 256, 256, moments=1)


@pytest.mark.parametrize(
    ("story", "stage", "stages", "budget", "rows", "tokens"),
    [
        ("one stage holds one microbatch", 0, 1, 64, 100, 64),
        ("the last stage too", 2, 3, 64, 100, 64),
        ("the first of three takes in seven before a gradient is back", 0, 3, 64, 100, 7 * 64),
        ("never more than one step of each task", 0, 3, 64, 3, 3 * 32),
        ("a row longer than the budget travels alone", 0, 1, 16, 100, 32),
    ],
)
def test_tokens_held(story: str, stage: int, stages: int, budget: int, rows: int, tokens: int) -> None:
    report = STAGES[0].model_copy(update={"stage": stage})
    assert worst_case([demand(rows=rows)], FACTS, report, stages, budget).tokens == tokens, story


def test_the_last_stage_pays_for_the_loss() -> None:
    last = STAGES[1]
    assert prior(FACTS, last, 2).forward.coefficients.b4 == 8 * FACTS.vocab_size
    assert prior(FACTS, STAGES[0], 2).forward.coefficients.b4 == 0
    shape = worst_case([demand(rows=1)], FACTS, last, 2, 128).microbatch
    assert (shape.supervised, shape.loss_rows) == (32, 3 * 16 - 1), "one of them could be a task's only one"
    assert worst_case([demand(rows=1)], FACTS, STAGES[0], 2, 128).microbatch.loss_rows == 0


def test_recomputation_leaves_one_hidden_state_a_layer_and_one_layers_activations() -> None:
    def per_token(layers: int, recompute: bool) -> tuple[float, float]:
        stage = STAGES[1].model_copy(update={"last_layer": 4 + layers - 1})
        fit = prior(FACTS, stage, 2, recompute=recompute)
        return fit.kept.coefficients.b1, fit.backward.coefficients.b1

    one_layer = per_token(2, False)[0] - per_token(1, False)[0]
    assert per_token(4, False)[0] == 4 * one_layer
    hidden = HIDDEN * FACTS.dtype_bytes
    assert per_token(4, True)[0] == (4 + 1) * hidden
    assert per_token(4, True)[1] == per_token(1, False)[1] + (4 + 1) * hidden
    assert worst_case([demand()], FACTS, STAGES[1], 2, 128, recompute=True).microbatch.exact_bytes == 0


def test_a_microbatch_is_full_of_the_rows_that_leave_most_and_keeps_every_adapted_input_once() -> None:
    narrow, wide = demand(rank=2, rows=4), demand(rank=50, rows=1)  # 128 and 32 tokens
    groups = {"input_groups": (("q_proj",), ("down_proj",))}
    shape = worst_case([narrow, wide], FACTS, STAGES[1].model_copy(update=groups), 2, 64).microbatch
    low = 32 * 50 + 32 * 2  # both adapt q_proj and v_proj, of which the model has q_proj
    assert shape.exact_bytes == 2 * (64 * HIDDEN + low) * 4


def test_a_task_that_does_not_fit_may_fit_with_recomputation() -> None:
    plain = model(margin=0.0, a=demand(rows=64, longest=128))
    budget = plain.check(["a"]).needed - 1
    tight = replace(plain, budget=budget)
    assert not tight.check(["a"]).fits
    assert replace(tight, recompute=True).check(["a"]).fits


def model(budget: int | None = None, margin: float = 0.0, **demands: Demand) -> MemoryModel:
    return MemoryModel(FACTS, STAGES, 128, budget, margin, demands)


@pytest.mark.parametrize("tightest", [0, 1])
def test_the_verdict_is_that_of_the_tightest_stage(tightest: int) -> None:
    stages = list(STAGES)
    stages[tightest] = stages[tightest].model_copy(update={"resident_bytes": 800_000_000})
    check = MemoryModel(FACTS, tuple(stages), 128, None, 0.0, {"a": demand()}).check(["a"])
    assert (check.fits, check.stage) == (True, tightest)


def test_the_budget_of_the_spec_comes_before_the_device_and_the_margin_is_kept_free() -> None:
    needed = model(a=demand()).check(["a"]).needed
    assert model(budget=needed, a=demand()).check(["a"]).fits
    assert not model(budget=needed, margin=0.01, a=demand()).check(["a"]).fits
    assert not model(budget=needed - 1, a=demand()).check(["a"]).fits


demands = st.lists(
    st.builds(demand, st.integers(1, 64), st.integers(1, 64), st.integers(2, 256)), min_size=1, max_size=6
)


@given(demands, st.integers(16, 512), st.sampled_from([0, 1]))
def test_a_task_less_never_needs_more(many: list[Demand], budget: int, stage: int) -> None:
    fit = prior(FACTS, STAGES[stage], 2)

    def needed(some: list[Demand]) -> int:
        return stage_need(some, FACTS, STAGES[stage], 2, budget, fit).total

    assert needed(many[1:]) <= needed(many)
    assert needed([]) < needed(many)


def test_after_memory_ran_out_the_same_tasks_never_fit_again_and_one_of_them_still_does() -> None:
    two = model(a=demand(), b=demand())
    two = replace(two, budget=two.check(["a", "b"]).needed)
    assert two.check(["a", "b"]).fits
    learned = {0: two.fit_of(STAGES[0]), 1: two.corrected(1, ["a", "b"])}
    assert not replace(two, learned=learned).check(["a", "b"]).fits
    again = replace(two, learned=learned)
    assert again.corrected(1, ["a", "b"]) == learned[1], "it is corrected once"


def test_memory_that_ran_out_is_learned_from_only_while_all_tasks_of_that_time_are_there() -> None:
    both = model(a=demand(rows=1), b=demand(rank=64, rows=64, longest=64))
    both = replace(both, budget=both.by_stage(["a", "b"])[1].needed)
    held = to_status({0: both.fit_of(STAGES[0]), 1: both.fit_of(STAGES[1])}, "origin")
    exhausted = [MemoryExhausted(stage=1, tasks=("a", "b"))]
    learned = learn(both, held, (), exhausted)
    assert learned[1].correction > 1.0
    left = replace(both, demands={"a": both.demands["a"]})
    for _ in range(5):  # the workers say it again with every report
        learned = learn(left, to_status(learned, "origin"), (), exhausted)
    assert learned[1].correction == pytest.approx(learn(both, held, (), exhausted)[1].correction)
    assert learn(left, held, (), [MemoryExhausted(stage=2, tasks=("a",))]) == learn(left, held, ())


def test_quantised_matrices_are_dense_a_group_at_a_time() -> None:
    """q_proj and down_proj have 64 * 64 and 128 * 64 numbers. In bfloat16 on a CPU they are dense in float32, too. On a GPU
    the making is measured."""
    stage = STAGES[0]
    assert dense_bytes(FACTS, stage) == 0
    packed = stage.model_copy(update={"quantized": True})
    assert dense_bytes(FACTS, packed) == 4 * 128 * 64 + UNPACKING_BYTES
    half = FACTS.model_copy(update={"dtype_bytes": 2})
    assert dense_bytes(half, packed) == (4 + 2) * 128 * 64 + UNPACKING_BYTES
    assert dense_bytes(half, packed.model_copy(update={"device": "cuda:0"})) == 2 * 128 * 64
    needs = [stage_need((), FACTS, one, 2, 128, prior(FACTS, one, 2)).weights for one in (packed, stage)]
    assert needs[0] - needs[1] == 4 * 128 * 64 + UNPACKING_BYTES


def test_modules_that_read_the_same_input_are_dense_together() -> None:
    wide = modules(0, 4)[0].model_copy(update={"name": "k_proj", "out_features": 32})
    facts = FACTS.model_copy(update={"modules": (modules(0, 4)[0], wide)})
    both, told = 4 * (64 * 64 + 64 * 32) + UNPACKING_BYTES, STAGES[0].model_copy(update={"quantized": True})
    assert dense_bytes(facts, told) == both, "before anybody has told, alike inputs are taken for one"
    assert (
        dense_bytes(facts, told.model_copy(update={"input_groups": (("q_proj",), ("k_proj",))}))
        == 4 * 64 * 64 + UNPACKING_BYTES
    )
    assert dense_bytes(facts, told.model_copy(update={"input_groups": (("q_proj", "k_proj"),)})) == both


def test_sums_count_dense_matrices_as_the_model_does() -> None:
    stages = tuple(stage.model_copy(update={"quantized": True}) for stage in STAGES)
    demands = {
        "a": Demand(LoRAConfig(rank=4, target_modules=("q_proj",)), 512, 128),
        "b": Demand(LoRAConfig(rank=8, target_modules=("all-linear",)), 256, 64),
    }
    model = MemoryModel(FACTS, stages, 512, None, 0.05, demands)
    for stage, verdict in zip(reckonings(model), model.by_stage(demands), strict=True):
        sums = stage.sums(stage.layout.brought(demand) for demand in demands.values())
        assert stage.needed(sums) == verdict.needed


def test_what_travels_beside_hidden_states_is_kept_on_both_sides_of_a_border() -> None:
    """Of a token in float32: stage 0 gives 32 learnt numbers more, stage 1 is given them and 16 constant ones."""
    borders = (
        BorderShape(forward=HIDDEN + 24, backward=HIDDEN),
        BorderShape(forward=HIDDEN + 48, backward=HIDDEN + 32),
    )
    facts = FACTS.model_copy(update={"borders": borders})
    for stage, kept, passing in zip(STAGES, (24 + 32, 48), (32, 32), strict=True):
        plain, wide = (prior(one, stage, 2) for one in (FACTS, facts))
        assert wide.kept.coefficients.b1 - plain.kept.coefficients.b1 == 4 * kept
        assert wide.backward.coefficients.b1 - plain.backward.coefficients.b1 == 4 * (kept + passing)
