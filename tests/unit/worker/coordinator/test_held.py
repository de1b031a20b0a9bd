"""What a report says of memory that tasks hold which are out."""

from __future__ import annotations

import pytest

from mlora_worker.protocol import REPORT_FORMAT, Report


def report(held: tuple[int, ...] | None) -> Report:
    return Report(run_id="r", sequence=1, plan_generation=1, ready=True, held=held)


@pytest.mark.parametrize("format", [1, 3, 4])
def test_a_reader_of_a_former_format_is_told_nothing_of_it(format: int) -> None:
    assert "held" not in report((0, 5)).as_understood_by(format).to_json()


def test_a_reader_of_this_format_is_told_it_by_stage() -> None:
    said = report((0, 5)).as_understood_by(REPORT_FORMAT).to_json()
    assert Report.model_validate_json(said).held == (0, 5)
    assert "held" not in report(None).to_json(), "mostly there is nothing to say"
