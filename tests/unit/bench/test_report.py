"""What a benchmark prints."""

from __future__ import annotations

import json

import pytest

from bench.report import last_line, table


def test_the_last_line_is_json_with_the_result_and_what_is_needed_to_judge_it() -> None:
    line = last_line(
        "limit", {"over_base": 1.234567, "parts": [{"x": 0.00012345}]}, repetitions=3, threads=1, quick=False
    )
    assert "\n" not in line
    found = json.loads(line)
    assert found["bench"] == "limit"
    assert found["over_base"] == 1.235
    assert found["parts"] == [{"x": 0.0001234}] or found["parts"] == [{"x": 0.0001235}]
    assert found["repetitions"] == 3
    assert found["quick"] is False
    assert "cores" in found["machine"]
    assert set(found["versions"]) == {"python", "torch", "transformers", "peft"}


@pytest.mark.parametrize("figure", [float("nan"), float("inf")])
def test_a_figure_that_is_not_finite_is_never_printed(figure: float) -> None:
    with pytest.raises(ValueError):
        last_line("limit", {"over_base": figure}, repetitions=1, threads=1, quick=True)


def test_a_table_has_columns_of_even_width() -> None:
    lines = table(["side", "tokens/s"], [["ours", 12345.6], ["peft", None]]).splitlines()
    assert lines == ["side  tokens/s", "ours    12,346", "peft         -"]
