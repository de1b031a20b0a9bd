"""What a user reads of a task that does not go on: the words behind the conditions."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import Contact, Key
from mlora_worker.protocol import Failure, FailureReason

REFUSAL = Failure(reason=FailureReason.ACCESS_DENIED, message="s3://adapters/t1: denied")


def status(make: Any, phase: str, held: dict[str, Any] | None = None, **fields: Any) -> TaskStatus:
    contact = Contact(report=make.report(make.reported(phase, step=7, **fields)))
    snapshot = make.snapshot(make.task(status=held), group=make.group(), contact=contact)
    found: TaskStatus = decide(snapshot, make.settings(), make.now).task_statuses[Key("team-a", "t1")]
    return found


def said(of: TaskStatus, type_: str) -> tuple[str, str, str] | None:
    return next(
        ((str(one.status), one.reason, one.message) for one in of.conditions if one.type == type_), None
    )


@pytest.mark.parametrize(("phase", "kept"), [("Saving", True), ("Training", False)])
def test_only_a_finished_adapter_is_said_to_be_kept(make: Any, phase: str, kept: bool) -> None:
    found = said(status(make, phase, blocked=REFUSAL), "UploadBlocked")
    assert found is not None
    assert found[:2] == ("True", "AccessDenied")
    assert ("finished adapter" in found[2]) is kept


def test_a_task_that_waits_for_a_busy_hub_says_until_when_and_has_nothing_to_upload(make: Any) -> None:
    words = (
        "fetching its rows waits for its store: the hub is busy, so the request is retried at 12:03:20 UTC"
    )
    busy = Failure(reason=FailureReason.STORAGE_UNREACHABLE, message=words)
    contact = Contact(report=make.report(make.reported("Preparing", blocked=busy)))
    snapshot = make.snapshot(make.task(), group=make.group(), contact=contact)
    found = decide(snapshot, make.settings(), make.now).task_statuses[Key("team-a", "t1")]
    assert (found.state, found.reason) == ("Preparing", "WaitingForStore")
    assert said(found, "Admitted") == ("False", "WaitingForStore", words)
    assert said(found, "UploadBlocked") is None


def test_a_task_that_failed_is_blocked_no_more(make: Any) -> None:
    assert said(status(make, "Failed", blocked=REFUSAL), "UploadBlocked") is None
    held = status(make, "Training", blocked=REFUSAL).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert said(status(make, "Failed", held, blocked=REFUSAL), "UploadBlocked") == ("False", "Finished", "")


def test_what_is_blocked_stays_so_while_nobody_answers(make: Any) -> None:
    held = status(make, "Saving", blocked=REFUSAL).model_dump(mode="json", by_alias=True, exclude_none=True)
    snapshot = make.snapshot(make.task(status=held), group=make.group(), contact=Contact(lost_since=make.now))
    silent = decide(snapshot, make.settings(), make.now).task_statuses[Key("team-a", "t1")]
    found = said(silent, "UploadBlocked")
    assert found is not None
    assert found[:2] == ("True", "AccessDenied")


@pytest.mark.parametrize("end", ["Succeeded", "Failed"])
def test_a_displaced_task_that_ends_is_preempted_no_more(make: Any, end: str) -> None:
    held = {"conditions": [make.condition("Preempted", "True", "Preempted")], "state": "Preempted"}
    assert said(status(make, end, held), "Preempted") == ("False", "Finished", "")


def test_a_task_whose_workers_start_anew_says_that_it_was_restarted(make: Any) -> None:
    """`Pending` alone looks as if it had never run."""
    held = {"run": "run-1", "step": 7, "conditions": [make.condition("Running", "True", "Training")]}
    contact = Contact(starting=True, lost_since=make.now, error="loading")
    snapshot = make.snapshot(make.task(status=held), group=make.group(ready=0), contact=contact)
    found = decide(snapshot, make.settings(), make.now).task_statuses[Key("team-a", "t1")]
    assert (found.state, found.reason) == ("Pending", "Restarting")
    assert "0 of 2 workers" in (said(found, "Admitted") or ("", "", ""))[2]
