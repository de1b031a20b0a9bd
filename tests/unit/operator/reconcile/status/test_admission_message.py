"""What the scheduler says of a task, in the words of its status."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.reconcile.status.admission_message import admission_message
from mlora_operator.scheduling.admission import Admission, AdmissionOutcome


def waiting(make: Any, status: str, reason: str) -> Any:
    held = {**make.condition("Admitted", status, reason), "message": "as it was told"}
    return make.task(status={"conditions": [held]})


@pytest.mark.parametrize(
    ("story", "status", "reason", "words_stay", "kept"),
    [
        ("told so a moment ago", "False", "WaitingForMemory", True, True),
        ("told so long ago", "False", "WaitingForMemory", False, False),
        ("told something else", "False", "PreparingData", True, False),
        ("it waits for its namespace's turn no more", "False", "NamespaceLimitReached", True, False),
        ("it has just lost its place", "True", "WaitingForMemory", True, False),
    ],
)
def test_who_waits_keeps_the_words_that_it_was_told_a_moment_ago(
    make: Any, story: str, status: str, reason: str, words_stay: bool, kept: bool
) -> None:
    place = Admission(AdmissionOutcome.WAITING, behind=make.task("older").candidate)
    found = admission_message(waiting(make, status, reason), place, words_stay=words_stay)
    assert found is not None
    assert found.cause.reason == "WaitingForMemory"
    assert (found.cause.message == "as it was told") is kept, story
    assert kept or "team-a/older" in found.cause.message


def test_nothing_is_said_of_whom_the_scheduler_does_not_speak_of(make: Any) -> None:
    assert admission_message(make.task(), None, words_stay=True) is None
