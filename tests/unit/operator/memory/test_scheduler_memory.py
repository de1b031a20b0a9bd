"""What is remembered of the memory model says the same as the model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlora_operator.memory.fit import Coefficients, FittedLine, StageFit
from mlora_operator.memory.model import Demand, MemoryModel
from mlora_operator.memory.reckoning import layouts, reckonings, reported_groups
from mlora_operator.memory.scheduler_memory import DemandKinds, MemoryAnswers, scheduler_memory
from mlora_worker.protocol import AdapterType, LoRAConfig
from tests.fixtures.stories import stories
from tests.fixtures.toy_facts import toy_facts, toy_stages

loras = st.builds(
    LoRAConfig,
    rank=st.sampled_from([4, 16, 64]),
    target_modules=st.sampled_from([("q_proj",), ("v_proj",), ("q_proj", "v_proj")]),
    use_dora=st.booleans(),
) | st.builds(
    LoRAConfig,
    type=st.just(AdapterType.VERA),
    rank=st.sampled_from([4, 64]),
    target_modules=st.sampled_from([("q_proj",), ("q_proj", "v_proj")]),
)
demands = st.builds(
    lambda lora, moments, rows, longest: Demand(lora, rows * longest, longest, moments),
    loras,
    st.sampled_from([1, 2]),
    st.integers(1, 16),
    st.sampled_from([64, 256, 1024]),
)


def lines(seed: int) -> FittedLine:
    """As if it had been learned: any terms may count."""
    rng = random.Random(seed)
    return FittedLine(
        Coefficients(*(rng.choice([0.0, rng.uniform(0, 3)]) for _ in range(10))), rng.uniform(0.01, 0.1)
    )


fits = st.builds(
    lambda seed, widest, correction: StageFit(
        lines(seed), lines(seed + 1), lines(seed + 2), 9, widest, correction
    ),
    st.integers(0, 999),
    st.sampled_from([0, 100, 5000]),
    st.sampled_from([1.0, 1.3]),
)
shapes = st.tuples(st.booleans(), st.dictionaries(st.integers(0, 1), fits), st.sampled_from([64, 4096]))


def model(
    each: Mapping[str, Demand],
    budget: int | None = None,
    shape: tuple[bool, Mapping[int, StageFit], int] = (False, {}, 4096),
) -> MemoryModel:
    recompute, learned, microbatch = shape
    return MemoryModel(toy_facts(), toy_stages(), microbatch, budget, 0.0, each, recompute, learned)


@given(st.lists(demands, min_size=1, max_size=7), shapes)
@settings(deadline=None)
def test_sums_are_the_models_bytes_to_the_last_one(each: list[Demand], shape: Any) -> None:
    """Whatever was learned, with and without recomputation, in any order."""
    by_uid = {str(number): demand for number, demand in enumerate(each)}
    plain = model(by_uid, shape=shape)
    for stage, one, other in zip(
        reckonings(plain), plain.by_stage(by_uid), plain.by_stage(reversed(by_uid)), strict=True
    ):
        sums = stage.sums(map(stage.layout.brought, each))
        assert stage.needed(sums) == one.needed == other.needed
        first, *rest = map(stage.layout.brought, each)
        for budget, fits in ((one.needed, True), (one.needed - 1, False)):
            exactly = replace(stage, budget=budget)
            assert exactly.fits(sums) == exactly.fits_beside(stage.sums(rest), first) == fits
        assert stage.needed(stage.sums(())) == plain.by_stage(())[stage.stage.stage].needed


@given(st.lists(demands, min_size=1, max_size=5), st.floats(0.2, 1.2), shapes, st.data())
@settings(deadline=None, max_examples=stories(40))
def test_answers_are_those_of_the_model(each: list[Demand], part: float, shape: Any, data: Any) -> None:
    """Whatever was asked before, in whatever order tasks are added."""
    by_uid = {str(number): demand for number, demand in enumerate(each)}
    whole = max(check.needed for check in model(by_uid, shape=shape).by_stage(by_uid))
    asked = model(by_uid, int(whole * part), shape)
    room = scheduler_memory(asked)
    for uids in data.draw(st.lists(st.permutations(list(by_uid)), min_size=1, max_size=2)):
        held = room.held(())
        for number, uid in enumerate(uids):
            for other in uids[number:]:
                beside = room.plus(held, other)
                fits = asked.check([*held.uids, other]).fits
                assert room.fits(beside) == room.fits_beside(held, other) == fits
            held = room.plus(held, uid)
            assert room.fits_alone(uid) == asked.check([uid]).fits
    assert room.check(held) == asked.check(uids)


def test_an_unknown_task_is_an_error() -> None:
    with pytest.raises(KeyError):
        scheduler_memory(model({})).held(("a",))


def test_a_room_answers_also_when_kinds_have_been_forgotten_since_it_was_made() -> None:
    """It is kept from one decision to the next, while others ask about other tasks."""
    rooms = []
    kinds = DemandKinds(layouts(toy_facts(), reported_groups(toy_stages()), recompute=False), most=1)
    for ranks in ((1, 2, 3), (4, 5, 6)):
        asked = model({str(rank): Demand(LoRAConfig(rank=rank), 64, 64) for rank in ranks})
        rooms.append((asked, MemoryAnswers(kinds, reckonings(asked, kinds.layouts)).memory(asked)))
    asked, room = rooms[0]
    assert not kinds.brought.keys() & room.brought.keys(), "they were forgotten"
    held = room.held(["1", "2"])
    assert room.fits_beside(held, "3") == asked.check(["1", "2", "3"]).fits
    assert room.fits(room.plus(held, "3")) == asked.check(["1", "2", "3"]).fits


def test_what_tasks_that_are_out_hold_counts_on_its_stage_alone_and_only_for_now() -> None:
    each = {"a": Demand(LoRAConfig(rank=16), 512, 256), "b": Demand(LoRAConfig(rank=4), 512, 256)}
    needed = [check.needed for check in model(each).by_stage(each)]
    budget = max(needed) + 1000
    asked = model(each, budget)
    for stage, need in enumerate(needed):
        for left, fits in ((budget - need, True), (budget - need + 1, False)):
            lingering = tuple(left if stage == other else 0 for other in range(len(needed)))
            room = scheduler_memory(asked, lingering)
            held = room.held(each)
            assert room.fits_already(held) is fits
            assert room.fits(held)
            assert room.fits_alone("a")
            assert not room.says_the_same_as(scheduler_memory(asked))
            assert room.says_the_same_as(scheduler_memory(asked, lingering))
    assert scheduler_memory(asked).fits_already(scheduler_memory(asked).held(each))
