"""Durations as Kubernetes writes them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from mlora_operator.api.units import LONGEST, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("10m", 600), ("1h30m", 5400), ("1500ms", 1.5), ("0.5h", 1800), ("0s", 0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "10", "m", "10m ", "-1h", "1d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["99999999999h", "876001h", f"{'9' * 400}ms"])
def test_a_duration_that_no_clock_holds_is_the_longest_one(text: str) -> None:
    assert parse_duration(text) == LONGEST
    now = datetime(2026, 3, 1, tzinfo=UTC)
    assert now - LONGEST < now < now + LONGEST
