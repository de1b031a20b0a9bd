"""What a report says of a stage whose matrices become dense."""

from __future__ import annotations

from mlora_worker.protocol import REPORT_FORMAT, Report
from tests.fixtures.toy_facts import toy_stages


def report(quantized: bool | None) -> Report:
    stages = tuple(stage.model_copy(update={"quantized": quantized}) for stage in toy_stages())
    return Report(run_id="r", sequence=1, plan_generation=1, ready=True, stages=stages)


def test_a_reader_of_a_former_format_is_told_nothing_of_it() -> None:
    assert "quantized" not in report(True).as_understood_by(6).to_json()


def test_a_reader_of_this_format_is_told() -> None:
    said = report(True).as_understood_by(REPORT_FORMAT).to_json()
    assert [stage.quantized for stage in Report.model_validate_json(said).stages] == [True, True]
    assert "quantized" not in report(None).to_json(), "mostly there is nothing to say"
