"""What only time decides of a task."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import Contact, Key

T1 = Key("team-a", "t1")
ACCEPTED, ADMITTED = ("Accepted", "True", "Accepted"), ("Admitted", "True", "Admitted")
RUNNING = ("Running", "True", "Training")


def at(make: Any, seconds: float) -> str:
    """A time so long ago."""
    return f"{make.now - timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%SZ}"


def status(make: Any, *held: tuple[str, str, str], **fields: Any) -> dict[str, Any]:
    return {"pipeline": "team-a/toy", "conditions": [make.condition(*one) for one in held], **fields}


def outcome(make: Any, task: Any, **world: Any) -> Any:
    return decide(make.snapshot(task, **world), make.settings(), make.now)


def failed(made: Any) -> str | None:
    """Message of the failure, if that is a deadline's."""
    held = {one.type: one for one in made.task_statuses[T1].conditions}
    one = held.get("Failed")
    if one is None or one.status != "True":
        return None
    assert one.reason == made.task_statuses[T1].reason == "DeadlineExceeded"
    assert made.task_statuses[T1].state == "Failed"
    assert held["Succeeded"].status == "False"
    assert made.task_statuses[T1].completion_time is not None
    return str(one.message)


@pytest.mark.parametrize(("age", "late"), [(99, False), (100, True), (5000, True)])
def test_what_never_starts_fails_at_its_start_deadline(make: Any, age: int, late: bool) -> None:
    made = outcome(make, make.task(age=age, startDeadlineSeconds=100))
    assert (failed(made) is not None) is late
    assert ("Warning", "DeadlineExceeded") in {(one.type, one.reason) for one in made.events} or not late


def test_it_says_what_kept_it_from_starting(make: Any) -> None:
    missing = {"secretRef": {"name": "nope"}}
    held = {
        "conditions": [make.condition("Accepted", "False", "SecretNotFound") | {"message": "no Secret nope"}]
    }
    task = make.task(age=999, startDeadlineSeconds=100, storage=missing, status=held)
    message = failed(outcome(make, task))
    assert message is not None
    assert "SecretNotFound: no Secret nope" in message
    assert "mlora.dev/retry" in message


def test_one_that_is_late_holds_no_place_and_keeps_no_worker_up(make: Any) -> None:
    task = make.task(age=999, startDeadlineSeconds=100)
    contact = Contact(report=make.report(make.reported("Prepared")))
    made = outcome(make, task, group=make.group(), contact=contact)
    assert failed(made)
    assert [plan.tasks for plan in made.plans.values()] == [()]
    assert made.pipeline_statuses[Key("team-a", "toy")].waiting_tasks == 0


def test_a_task_that_has_started_has_no_start_deadline_any_more(make: Any) -> None:
    held = status(make, ACCEPTED, startTime=at(make, 500))
    assert failed(outcome(make, make.task(age=999, startDeadlineSeconds=100, status=held))) is None


def running(make: Any, limit: int = 100, started: float = 100) -> Any:
    held = status(make, ACCEPTED, ADMITTED, RUNNING, startTime=at(make, started), run="run-1", step=7)
    return make.task(age=9999, activeDeadlineSeconds=limit, status=held)


def test_one_that_runs_past_its_deadline_leaves_behind_its_checkpoint_first(make: Any) -> None:
    contact = Contact(report=make.report(make.reported("Training", step=7)))
    made = outcome(make, running(make), group=make.group(), contact=contact)
    assert failed(made) is None
    told = made.task_statuses[T1]
    assert (told.state, told.reason) == ("Training", "DeadlineExceeded")
    ((only,),) = [plan.tasks for plan in made.plans.values()]
    assert only.admitted is False


@pytest.mark.parametrize("phase", ["Preempted", "Prepared", "Preparing"])
def test_once_it_is_out_it_fails(make: Any, phase: str) -> None:
    contact = Contact(report=make.report(make.reported(phase, step=7)))
    assert failed(outcome(make, running(make), group=make.group(), contact=contact))


def test_within_its_deadline_it_trains(make: Any) -> None:
    contact = Contact(report=make.report(make.reported("Training", step=7)))
    made = outcome(make, running(make, started=99), group=make.group(), contact=contact)
    assert made.task_statuses[T1].reason == "Training"


def test_one_that_saves_its_adapter_is_finished(make: Any) -> None:
    contact = Contact(report=make.report(make.reported("Saving", step=50)))
    made = outcome(make, running(make), group=make.group(), contact=contact)
    assert made.task_statuses[T1].state == "Saving"


def test_while_the_coordinator_does_not_answer_it_may_train_on(make: Any) -> None:
    contact = Contact(report=make.report(make.reported("Training")), lost_since=make.now, error="no answer")
    assert failed(outcome(make, running(make), group=make.group(), contact=contact)) is None
    back = Contact(report=make.report(run="run-2"))  # the group was started anew, without it
    assert failed(outcome(make, running(make), group=make.group(), contact=back))


@pytest.mark.parametrize("nodes", [None, 0, 2])
def test_one_whose_workers_are_given_back_or_have_no_node_fails(make: Any, nodes: int | None) -> None:
    contact = Contact(report=make.report(make.reported("Training")), lost_since=make.now, error="no answer")
    group = make.group(replicas=2 if nodes is not None else 0, ready=0)
    if nodes == 0:
        group = replace(group, pods=tuple(replace(pod, placed=False) for pod in group.pods))
    made = outcome(make, running(make), group=group, contact=contact)
    assert (failed(made) is not None) is (nodes != 2)


def test_one_whose_pipeline_is_gone_fails_at_once(make: Any) -> None:
    assert failed(outcome(make, running(make), pipelines=()))


FINISHED = [("Succeeded", "True", "AdapterUploaded"), ("Failed", "True", "InvalidRow")]


@pytest.mark.parametrize("ended", FINISHED)
@pytest.mark.parametrize(("ago", "gone"), [(59, False), (60, True)])
def test_a_finished_task_is_deleted_when_its_time_to_live_is_over(
    make: Any, ended: tuple[str, str, str], ago: int, gone: bool
) -> None:
    held = status(make, ACCEPTED, ended, completionTime=at(make, ago))
    made = outcome(make, make.task(ttlSecondsAfterFinished=60, status=held))
    assert [task.key for task in made.delete_tasks] == ([T1] if gone else [])


def test_without_a_time_to_live_it_stays_and_an_unfinished_one_stays_anyway(make: Any) -> None:
    held = status(make, ACCEPTED, FINISHED[0], completionTime=at(make, 9999))
    assert outcome(make, make.task(status=held)).delete_tasks == ()
    assert outcome(make, make.task(ttlSecondsAfterFinished=0, age=9999)).delete_tasks == ()
