"""What people read of a place that a task did not get."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from mlora_operator.scheduling.admission import Admission, AdmissionOutcome
from mlora_operator.scheduling.order import Candidate
from mlora_operator.scheduling.words import must_leave, not_yet

OTHER = Candidate("uid-1", "team-a", "secret-plan", 0, datetime(2026, 3, 1, tzinfo=UTC))
PLACES = {
    "behind": Admission(AdmissionOutcome.WAITING, behind=OTHER),
    "after": Admission(AdmissionOutcome.WAITING, after=OTHER),
    "displaced": Admission(AdmissionOutcome.PREEMPTED, displaced_by=OTHER),
}


@pytest.mark.parametrize("story", PLACES)
def test_a_task_is_named_within_its_own_namespace_only(story: str) -> None:
    say = must_leave if story == "displaced" else not_yet
    assert "team-a/secret-plan" in say(PLACES[story], "team-a")
    told = say(PLACES[story], "team-b")
    assert "a task of another namespace" in told
    assert "team-a" not in told
    assert "secret-plan" not in told
