"""How long a task still trains, and how a span of time is written."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.cli.ages import span
from mlora_operator.cli.task_eta import seconds_left

TRAINING: dict[str, Any] = {
    "state": "Training",
    "step": 6,
    "totalSteps": 10,
    "tokensPerSecond": "50",
    "data": {"used": 20, "tokens": 10_000},
}


def left(training: dict[str, int] | None = None, **status: Any) -> float | None:
    return seconds_left({"spec": {"training": training or {}}, "status": TRAINING | status})


def test_steps_to_do_take_as_long_as_their_tokens() -> None:
    assert left() == 4 * (10_000 / 3) / 50  # 20 rows, 8 a step by default: 3 steps a pass
    assert left({"batchSize": 2, "gradientAccumulationSteps": 2}) == 4 * (10_000 / 5) / 50


@pytest.mark.parametrize(
    "status",
    [
        {"state": "Queued"},
        {"tokensPerSecond": None},
        {"tokensPerSecond": "nan"},
        {"tokensPerSecond": "soon"},
        {"data": None},
        {"totalSteps": None},
    ],
)
def test_what_is_not_known_is_not_guessed(status: dict[str, Any]) -> None:
    assert left(**status) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (200, "3m20s"), (180, "3m"), (3 * 3600 + 60, "3h1m"), (40 * 3600, "1d16h"),
     (12 * 86400, "12d"), (-5, "0s")],
)  # fmt: skip
def test_a_span_has_at_most_two_units(seconds: float, text: str) -> None:
    assert span(seconds) == text
