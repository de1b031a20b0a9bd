"""What a report says of a stage's weights."""

from __future__ import annotations

import pytest

from mlora_worker.protocol import REPORT_FORMAT, Report, StageReport


def report() -> Report:
    stage = StageReport(
        stage=0, first_layer=0, last_layer=1, device="cpu", resident_bytes=8, capacity_bytes=9,
        parameters=1, products="oneDNN",
    )  # fmt: skip
    return Report(run_id="r", sequence=1, plan_generation=1, ready=True, stages=(stage,))


@pytest.mark.parametrize("format", [1, 6])
def test_a_reader_of_a_former_format_is_told_nothing_of_products_nor_of_parameters(format: int) -> None:
    said = report().as_understood_by(format).to_json()
    assert "products" not in said
    assert "parameters" not in said


@pytest.mark.parametrize(("format", "told"), [(REPORT_FORMAT, True), (13, True), (12, False), (6, False)])
def test_what_carries_states_is_told_to_those_who_know_the_field(format: int, told: bool) -> None:
    stage = report().stages[0].model_copy(update={"recurrence": "Triton"})
    said = report().model_copy(update={"stages": (stage,)}).as_understood_by(format).to_json()
    assert ("recurrence" in said) == told


def test_a_reader_of_this_format_is_told_both() -> None:
    said = Report.model_validate_json(report().as_understood_by(REPORT_FORMAT).to_json())
    assert (said.stages[0].products, said.stages[0].parameters) == ("oneDNN", 1)
