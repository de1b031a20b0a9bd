"""What a report says of models whose later layers need more than hidden states."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from mlora_worker.protocol import REPORT_FORMAT, BorderShape, ModuleShape, Report
from tests.fixtures.toy_facts import toy_facts, toy_stages

BORDERS = (BorderShape(forward=96, backward=64), BorderShape(forward=112, backward=96))
NEVER = (
    ModuleShape(
        stage=0, name="projection", in_features=64, out_features=32, count=1, path="model.projection"
    ),
)


def report(borders: tuple[BorderShape, ...] | None, never: tuple[ModuleShape, ...] | None = NEVER) -> Report:
    facts = toy_facts().model_copy(update={"borders": borders, "never_adapted": never})
    return Report(run_id="r", sequence=1, plan_generation=1, ready=True, facts=facts, stages=toy_stages())


def test_a_reader_of_a_former_format_is_told_nothing_of_it() -> None:
    said = report(BORDERS).as_understood_by(13).to_json()
    assert "borders" not in said
    assert "neverAdapted" not in said


def test_a_reader_of_this_format_is_told() -> None:
    said = report(BORDERS).as_understood_by(REPORT_FORMAT).to_json()
    found = Report.model_validate_json(said).facts
    assert found is not None
    assert (found.borders, found.never_adapted) == (BORDERS, NEVER)
    plain = report(None, None).to_json()
    assert "borders" not in plain, "mostly there is nothing to tell"
    assert "neverAdapted" not in plain


def test_each_stage_has_one_border() -> None:
    with pytest.raises(ValidationError, match="1 borders, and there are 2 stages"):
        report(BORDERS[:1])


def test_a_module_of_a_stage_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValidationError, match="a module is on stage 2"):
        report(BORDERS, (NEVER[0].model_copy(update={"stage": 2}),))
