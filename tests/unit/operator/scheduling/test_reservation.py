"""Who is surely done first."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from mlora_operator.scheduling.entrant import Entrant, EntrantProgress, EntrantState
from mlora_operator.scheduling.order import Candidate
from mlora_operator.scheduling.reservation import is_over_by

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("story", "progress", "rounds", "expected"),
    [
        ("half the rounds are enough", EntrantProgress(0, 5), 10, True),
        ("a step more is not", EntrantProgress(0, 6), 10, False),
        ("steps that it did before it was sent away count", EntrantProgress(7, 12), 10, True),
        ("whose steps are not known is never sure", EntrantProgress(7), 10, False),
        ("nothing is over in no time", EntrantProgress(0, 1), 0, False),
    ],
)
def test_is_over_by(story: str, progress: EntrantProgress, rounds: float, expected: bool) -> None:
    one = Entrant(Candidate("a", "team-a", "a", 0, NOON), EntrantState.WAITING, NOON, progress)
    assert is_over_by(one, rounds) is expected, story
