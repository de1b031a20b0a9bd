"""A failed task runs again when its user says so, once a wish, and a succeeded one never."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.decode import read_task
from mlora_operator.reconcile.state.snapshot import Contact, Key

T1, TOY = Key("team-a", "t1"), Key("team-a", "toy")
FAILED, SUCCEEDED = ("Failed", "True", "InvalidRow"), ("Succeeded", "True", "AdapterUploaded")


def finished(
    make: Any, ended: tuple[str, str, str], wish: str | None, seen: str | None = None, **spec: Any
) -> Any:
    status = {
        "pipeline": "team-a/toy",
        "conditions": [make.condition("Accepted", "True", "Accepted"), make.condition(*ended)],
        "state": ended[0],
        "step": 7,
        "startTime": "2026-03-01T10:00:00Z",
        "completionTime": "2026-03-01T11:00:00Z",
        **({"retry": seen} if seen is not None else {}),
    }
    raw = make.raw_task(status=status, **spec)
    raw["metadata"]["annotations"] = {"mlora.dev/retry": wish} if wish is not None else {}
    return read_task(raw, allow_file_uris=False)


def outcome(make: Any, task: Any, **world: Any) -> Any:
    return decide(make.snapshot(task, **world), make.settings(), make.now)


@pytest.mark.parametrize(
    ("story", "ended", "wish", "seen", "again"),
    [
        ("a new value", FAILED, "1", None, True),
        ("another value than last time", FAILED, "2", "1", True),
        ("no annotation", FAILED, None, None, False),
        ("the value of last time", FAILED, "1", "1", False),
        ("it succeeded", SUCCEEDED, "1", None, False),
    ],
)
def test_when_a_task_runs_again(
    make: Any, story: str, ended: tuple[str, str, str], wish: str | None, seen: str | None, again: bool
) -> None:
    made = outcome(make, finished(make, ended, wish, seen))
    assert (T1 in made.task_statuses) is again, story
    assert ("Retried" in {one.reason for one in made.events}) is again, story


def test_it_is_open_again_and_keeps_its_step(make: Any) -> None:
    status = outcome(make, finished(make, FAILED, "1")).task_statuses[T1]
    assert {one.type for one in status.conditions if one.status == "True"} == {"Accepted"}
    assert not {"Failed", "Succeeded"} & {one.type for one in status.conditions}
    assert (status.state, status.step, status.retry, status.retries) == ("Pending", 7, "1", 1)
    assert status.start_time is status.completion_time is None
    assert status.retry_time == "2026-03-01T12:00:00Z"


def test_the_next_look_at_it_is_no_second_retry(make: Any) -> None:
    status = outcome(make, finished(make, FAILED, "1")).task_statuses[T1]
    raw = make.raw_task(status=status.model_dump(mode="json", by_alias=True, exclude_none=True))
    raw["metadata"]["annotations"] = {"mlora.dev/retry": "1"}
    made = outcome(make, read_task(raw, allow_file_uris=False))
    assert made.task_statuses[T1].retries == 1
    assert made.events == () or "Retried" not in {one.reason for one in made.events}


def test_its_coordinator_has_to_forget_the_failure_first(make: Any) -> None:
    task = finished(make, FAILED, "1")
    holds = Contact(report=make.report(make.reported("Failed")))
    waiting = outcome(make, task, group=make.group(), contact=holds)
    assert T1 not in waiting.task_statuses
    assert [plan.tasks for plan in waiting.plans.values()] == [()]  # which makes it forget
    forgot = Contact(report=make.report())
    again = outcome(make, task, group=make.group(), contact=forgot)
    ((plan,),) = [plan.tasks for plan in again.plans.values()]
    assert (plan.name, plan.started) == ("t1", True)


def test_a_value_that_was_there_while_it_ran_is_no_wish_after_its_failure(make: Any) -> None:
    raw = make.raw_task(status={"pipeline": "team-a/toy"})
    raw["metadata"]["annotations"] = {"mlora.dev/retry": "early"}
    contact = Contact(report=make.report(make.reported("Failed")))
    made = outcome(make, read_task(raw, allow_file_uris=False), group=make.group(), contact=contact)
    status = made.task_statuses[T1]
    assert (status.state, status.retry) == ("Failed", "early")


def test_deadlines_begin_anew(make: Any) -> None:
    task = finished(make, ("Failed", "True", "DeadlineExceeded"), "1", startDeadlineSeconds=100, age=9999)
    assert outcome(make, task).task_statuses[T1].state == "Pending"


def test_a_task_that_is_about_to_run_again_is_not_deleted(make: Any) -> None:
    holds = Contact(report=make.report(make.reported("Failed")))
    fresh = finished(make, FAILED, "1", ttlSecondsAfterFinished=1)
    assert outcome(make, fresh, contact=holds, group=make.group()).delete_tasks == ()
    stale = finished(make, FAILED, "1", "1", ttlSecondsAfterFinished=1)
    assert [task.key for task in outcome(make, stale).delete_tasks] == [T1]


def test_its_output_may_have_been_taken_meanwhile(make: Any) -> None:
    other = make.task(
        "other", output={"uri": "s3://adapters/t1"},
        status={"conditions": [make.condition("Accepted", "True", "Accepted")]},
    )  # fmt: skip
    made = decide(make.snapshot(finished(make, FAILED, "1"), other), make.settings(), make.now)
    assert made.task_statuses[T1].reason == "OutputInUse"
