"""What a report says of layers that carry a state, and of rows of experts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from mlora_worker.protocol import REPORT_FORMAT, MemorySample, Report, StateShape
from tests.fixtures.toy_facts import toy_facts, toy_stages

STATES = (StateShape(stage=1, count=2, token_bytes=4096),)


def report(states: tuple[StateShape, ...] | None) -> Report:
    facts = toy_facts().model_copy(update={"states": states})
    return Report(run_id="r", sequence=1, plan_generation=1, ready=True, facts=facts, stages=toy_stages())


def test_a_reader_of_a_former_format_is_told_nothing_of_them() -> None:
    assert "tokenBytes" not in report(STATES).as_understood_by(14).to_json()
    assert "states" not in report(None).to_json(), "most models have none"


def test_a_reader_of_this_format_is_told() -> None:
    said = report(STATES).as_understood_by(REPORT_FORMAT).to_json()
    found = Report.model_validate_json(said).facts
    assert found is not None
    assert found.states == STATES


def test_states_of_a_stage_that_there_is_not_are_refused() -> None:
    far = STATES[0].model_copy(update={"stage": toy_stages()[-1].stage + 1})
    with pytest.raises(ValidationError, match="and there are"):
        report((far,))


def test_rows_of_experts_are_left_out_for_a_former_reader() -> None:
    sample = MemorySample(stage=0, tokens=8, squared_tokens=64, expert_rows=5)
    told = report(None).model_copy(update={"memory": (sample,)})
    assert "expertRows" not in told.as_understood_by(14).to_json()
    assert told.as_understood_by(REPORT_FORMAT).memory == (sample,)
