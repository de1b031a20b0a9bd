"""How spans of time are written in a column."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from mlora_operator.api.spans import span
from mlora_operator.cli.ages import age


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (200, "3m20s"), (180, "3m"), (3 * 3600 + 60, "3h1m"), (40 * 3600, "1d16h"),
     (12 * 86400, "12d"), (-5, "0s")],
)  # fmt: skip
def test_a_span_has_at_most_two_units(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(("text", "shown"), [("2026-01-01T00:00:00Z", "1h"), ("soon", ""), (None, "")])
def test_an_age_that_is_not_known_is_left_out(text: str | None, shown: str) -> None:
    assert age(text, datetime(2026, 1, 1, 1, tzinfo=UTC)) == shown
