"""What a report says of routed experts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from mlora_worker.protocol import REPORT_FORMAT, ExpertShape, Report
from tests.fixtures.toy_facts import toy_facts, toy_stages

EXPERTS = (
    ExpertShape(
        stage=1,
        first_layer=2,
        count=2,
        experts=8,
        active=2,
        width=16,
        in_peft=("gate",),
        path="model.layers.*.mlp.experts",
    ),
)


def report(experts: tuple[ExpertShape, ...] | None) -> Report:
    facts = toy_facts().model_copy(update={"experts": experts})
    return Report(run_id="r", sequence=1, plan_generation=1, ready=True, facts=facts, stages=toy_stages())


def test_a_reader_of_a_former_format_is_told_nothing_of_them() -> None:
    assert "experts" not in report(EXPERTS).as_understood_by(8).to_json()


def test_a_reader_of_a_former_format_is_not_told_their_path() -> None:
    said = report(EXPERTS).as_understood_by(10)
    assert said.facts is not None
    assert said.facts.experts == (EXPERTS[0].model_copy(update={"path": None}),)
    assert '"path":"model.layers.*.mlp.experts"' not in said.to_json()


def test_a_reader_of_a_former_format_is_not_told_which_way_round_peft_takes_them() -> None:
    swapped = (EXPERTS[0].model_copy(update={"swapped": True}),)
    for format, path in ((11, EXPERTS[0].path), (10, None)):
        said = report(swapped).as_understood_by(format)
        assert said.facts is not None
        assert said.facts.experts == (EXPERTS[0].model_copy(update={"path": path}),)
        assert "swapped" not in said.to_json()
    assert '"swapped":true' in report(swapped).as_understood_by(12).to_json()


def test_a_reader_of_this_format_is_told() -> None:
    said = report(EXPERTS).as_understood_by(REPORT_FORMAT).to_json()
    found = Report.model_validate_json(said).facts
    assert found is not None
    assert found.experts == EXPERTS
    assert "experts" not in report(None).to_json(), "mostly there are none"


def test_experts_of_a_stage_that_there_is_not_are_refused() -> None:
    last = toy_stages()[-1].stage
    with pytest.raises(ValidationError, match=f"stage {last + 1}, and there are {last + 1} stages"):
        report((EXPERTS[0].model_copy(update={"stage": last + 1}),))
