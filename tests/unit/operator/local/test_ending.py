"""A local run is over when nothing on this machine can change any more."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.local.ending import UNDECIDED_WITHIN, Result, Undecided, endings


def task(name: str = "a", *, suspend: bool = False, **status: Any) -> dict[str, Any]:
    return {
        "kind": "LoRATask",
        "metadata": {"namespace": "n", "name": name},
        "spec": {"suspend": suspend},
        "status": status,
    }


def condition(type_: str, status: str, reason: str = "R", message: str = "m") -> dict[str, str]:
    return {"type": type_, "status": status, "reason": reason, "message": message}


DONE = task(conditions=[condition("Succeeded", "True")], state="Succeeded")
FAILED = task(conditions=[condition("Succeeded", "False"), condition("Failed", "True", "InvalidRow")])
NO_SECRET = task(state="Rejected", conditions=[condition("Accepted", "False", "SecretNotFound")])
TOO_LARGE = task(
    state="Rejected",
    conditions=[condition("Accepted", "True"), condition("Admitted", "False", "ExceedsCapacity")],
)
TRAINING = task(state="Training", pipeline="n/p", conditions=[condition("Running", "True")])


@pytest.mark.parametrize(
    ("one", "result", "reason", "bad"),
    [
        (DONE, Result.SUCCEEDED, "R", False),
        (FAILED, Result.FAILED, "InvalidRow", True),
        (NO_SECRET, Result.REJECTED, "SecretNotFound", True),
        (TOO_LARGE, Result.REJECTED, "ExceedsCapacity", True),
        (task(suspend=True), Result.SUSPENDED, "Suspended", False),
    ],
)
def test_how_a_task_ended(one: dict[str, Any], result: Result, reason: str, bad: bool) -> None:
    found = endings([one], {})
    assert found is not None
    assert (found[0].result, found[0].cause.reason, found[0].bad) == (result, reason, bad)


@pytest.mark.parametrize("one", [task(), TRAINING, task(state="Pending"), task(state="Queued")])
def test_a_task_that_may_still_go_on_keeps_the_run_going(one: dict[str, Any]) -> None:
    assert endings([DONE, one], {}) is None


def test_a_task_whose_ranks_are_not_started_again_is_abandoned_with_the_reason() -> None:
    found = endings([TRAINING, DONE], {"n/p": "rank 0 ended with exit code 1"})
    assert found is not None
    assert [end.result for end in found] == [Result.ABANDONED, Result.SUCCEEDED]
    assert found[0].cause.message == "rank 0 ended with exit code 1"
    assert endings([TRAINING], {"n/other": "x"}) is None


ODD = task(conditions=[condition("Accepted", "Unknown", "ReconcileError", "see the log")])
TRAINS_ON = task(
    pipeline="n/p", conditions=[condition("Accepted", "True", "ReconcileError"), condition("Running", "True")]
)
ODD_PIPELINE = {
    "kind": "LoRAPipeline",
    "metadata": {"namespace": "n", "name": "p"},
    "status": {"conditions": [condition("Ready", "Unknown", "ReconcileError", "its stages")]},
}


def test_a_task_about_which_nothing_can_be_decided_for_long_ends_the_run() -> None:
    since = Undecided()
    assert since.due(100.0) is None
    assert endings([ODD, DONE], {}, since.lasting([ODD, DONE], 100.0)) is None
    assert since.due(110.0) == UNDECIDED_WITHIN - 10
    assert endings([ODD, DONE], {}, since.lasting([ODD, DONE], 100.0 + UNDECIDED_WITHIN - 1)) is None
    found = endings([ODD, DONE], {}, since.lasting([ODD, DONE], 100.0 + UNDECIDED_WITHIN))
    assert found is not None
    assert [end.result for end in found] == [Result.ABANDONED, Result.SUCCEEDED]
    assert found[0].cause == ("ReconcileError", "see the log")


def test_what_passes_within_a_moment_ends_nothing() -> None:
    since = Undecided()
    since.lasting([ODD], 100.0)
    since.lasting([task()], 110.0)
    assert since.lasting([ODD], 120.0 + UNDECIDED_WITHIN) == {}
    assert since.due(120.0 + UNDECIDED_WITHIN) == UNDECIDED_WITHIN


def test_one_that_trains_is_waited_for_unless_nothing_can_be_decided_about_its_pipeline() -> None:
    since = Undecided()
    for now in (0.0, 10 * UNDECIDED_WITHIN):
        assert endings([TRAINS_ON], {}, since.lasting([TRAINS_ON], now)) is None
    since.lasting([TRAINS_ON, ODD_PIPELINE], 0.0)
    found = endings([TRAINS_ON], {}, since.lasting([TRAINS_ON, ODD_PIPELINE], UNDECIDED_WITHIN))
    assert found is not None
    assert (found[0].result, found[0].cause.message) == (Result.ABANDONED, "its stages")
