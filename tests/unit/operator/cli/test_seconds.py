"""Durations on the command line."""

from __future__ import annotations

import pytest

from mlora_operator.cli.seconds import seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [("90", 90), ("1.5", 1.5), ("90s", 90), ("15m", 900), ("1h30m", 5400), ("500ms", 0.5), ("0", 0)],
)
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "soon", "1 h", "-1", "1h 30m", "1d", "1e3", "inf"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration such as 10m"):
        seconds(text)
