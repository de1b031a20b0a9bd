"""What is remembered of the memory model says the same as the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.memory.model import Demand, MemoryModel
from mlora_operator.memory.room import room_of
from mlora_worker.protocol import LoRAConfig
from tests.fixtures.toy_facts import toy_facts, toy_stages

loras = st.builds(
    LoRAConfig,
    rank=st.sampled_from([4, 16, 64]),
    target_modules=st.sampled_from([("q_proj",), ("v_proj",), ("q_proj", "v_proj")]),
)
demands = st.builds(
    lambda lora, rows, longest: Demand(lora, rows * longest, longest),
    loras,
    st.integers(1, 16),
    st.sampled_from([64, 256, 1024]),
)


def model(each: Mapping[str, Demand], budget: int | None = None) -> MemoryModel:
    return MemoryModel(toy_facts(), toy_stages(), 4096, budget, 0.0, each)


@given(st.lists(demands, min_size=1, max_size=7), st.floats(0.2, 1.2), st.data())
def test_answers_are_those_of_the_model(each: list[Demand], part: float, data: Any) -> None:
    """Whatever was asked before, in whatever order tasks are added."""
    by_uid = {str(number): demand for number, demand in enumerate(each)}
    whole = max(verdict.needed for verdict in model(by_uid).by_stage(by_uid))
    asked = model(by_uid, budget=int(whole * part))
    room = room_of(asked)
    for uids in data.draw(st.lists(st.permutations(list(by_uid)), min_size=1, max_size=3)):
        held = room.held(())
        for number, uid in enumerate(uids):
            for other in uids[number:]:
                beside = room.plus(held, other)
                assert room.fits(beside) == asked.verdict([*held.uids, other]).fits
            held = room.plus(held, uid)
            assert room.fits_alone(uid) == asked.verdict([uid]).fits
    assert room.verdict(held) == asked.verdict(uids)


def test_an_unknown_task_is_an_error() -> None:
    with pytest.raises(KeyError):
        room_of(model({})).held(("a",))
