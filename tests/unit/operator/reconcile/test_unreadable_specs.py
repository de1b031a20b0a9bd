"""A task trains whose spec this operator does not understand, such as one that was made for a newer one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.snapshot import Contact, Key, Task

TOY = Key("team-a", "toy")
NEWER = {"training": {"schedule": "zigzag"}}  # a word that this version does not know


def trained(make: Any, **spec: Any) -> Task:
    return running(make, "t1", **spec)


def running(make: Any, name: str, **spec: Any) -> Task:
    held = [make.condition(one, "True") for one in ("Accepted", "Admitted", "Running")]
    task: Task = make.task(
        name, status={"pipeline": "team-a/toy", "run": "run-1", "conditions": held}, **spec
    )
    return task


def decided(make: Any, phase: str | None, *more: Task) -> tuple[Task, Decision]:
    task = trained(make, **NEWER)
    assert task.spec is None
    reports = [make.reported("Prepared", one.key.name) for one in more]
    reports += [make.reported(phase)] if phase is not None else []
    contact = Contact(report=make.report(*reports)) if phase is not None else Contact()
    return task, decide(
        make.snapshot(task, *more, group=make.group(), contact=contact), make.settings(), make.now
    )


@pytest.mark.parametrize("phase", ["Training", "Saving", None])
def test_it_trains_on_and_its_status_stays(make: Any, phase: str | None) -> None:
    task, decision = decided(make, phase)
    assert decision.task_statuses[task.key] == task.status
    assert TOY not in decision.plans, "no plan is made without it"
    assert decision.workers[TOY].replicas == 2, "it needs the workers"


def test_nobody_is_let_in_beside_it(make: Any) -> None:
    """Which room it leaves is not known."""
    _, decision = decided(make, "Training", make.task("t2"))
    assert TOY not in decision.plans
    alone = make.snapshot(
        make.task("t2"),
        group=make.group(),
        contact=Contact(report=make.report(make.reported("Prepared", "t2"))),
    )
    (plan,) = decide(alone, make.settings(), make.now).plans.values()
    assert [one.admitted for one in plan.tasks] == [True]


def test_others_are_forgotten_and_suspended_beside_one_that_became_unreadable(make: Any) -> None:
    """Its own plan stays what it was, and nobody is let in."""
    names = ("t1", "ended", "suspended", "goes-on")
    training = make.report(*(make.reported("Training", name) for name in names))
    before = make.snapshot(
        *(running(make, name) for name in names), group=make.group(), contact=Contact(report=training)
    )
    (sent,) = decide(before, make.settings(), make.now).plans.values()
    assert all(one.admitted for one in sent.tasks)
    done = [make.condition("Accepted", "True"), make.condition("Succeeded", "True")]
    now = (
        trained(make, **NEWER),
        make.task("ended", status={"pipeline": "team-a/toy", "conditions": done}),
        running(make, "suspended", suspend=True),
        running(make, "goes-on"),
        make.task("new", status={"pipeline": "team-a/toy"}),
    )
    said = [make.reported("Training", name) for name in names if name != "ended"]
    said.append(make.reported("Prepared", "new"))
    contact = Contact(report=make.report(*said, sequence=2), sent=sent, sent_run="run-1", sent_sequence=1)
    snapshot = make.snapshot(*now, group=make.group(), contact=contact)
    (plan,) = decide(snapshot, make.settings(), make.now).plans.values()
    told = {one.name: one for one in plan.tasks}
    wished = {"t1": True, "suspended": False, "goes-on": True, "new": False}
    assert {name: one.admitted for name, one in told.items()} == wished
    assert told["t1"] in sent.tasks
    took = replace(contact, report=make.report(*said, sequence=3, generation=plan.generation), sent=plan)
    assert not decide(replace(snapshot, contacts={TOY: took}), make.settings(), make.now).plans


@pytest.mark.parametrize(("phase", "condition"), [("Succeeded", "Succeeded"), ("Failed", "Failed")])
def test_how_it_ended_is_told(make: Any, phase: str, condition: str) -> None:
    task, decision = decided(make, phase)
    status = decision.task_statuses[task.key]
    assert {one.type for one in status.conditions if one.status == "True"} == {
        "Accepted",
        condition,
        "Finished",
    }
    assert status.completion_time is not None


def test_once_the_workers_do_not_have_it_its_field_is_named(make: Any) -> None:
    task, decision = decided(make, "Preparing")
    status = decision.task_statuses[task.key]
    assert (status.state, status.reason, status.pipeline) == ("Rejected", "InvalidSpec", None)
    assert decision.plans[TOY].tasks == ()


def test_one_that_a_replica_trains_stays_with_it(make: Any) -> None:
    marks = {"mlora.dev/replica-of": "toy", "mlora.dev/replica-number": "1", "mlora.dev/replica-hash": "x"}
    task, second = trained(make, **NEWER), Key("team-a", "toy-replica-1")
    snapshot = make.snapshot(
        task,
        pipelines=(make.pipeline(replicas={"max": 2}), make.pipeline("toy-replica-1", annotations=marks)),
        group=make.group(),
        contact=Contact(report=make.report(run="other")),
    )
    trains = Contact(report=make.report(make.reported("Training")))
    snapshot = replace(
        snapshot,
        groups={**snapshot.groups, second: make.group()},
        contacts={**snapshot.contacts, second: trains},
    )
    decision = decide(snapshot, make.settings(), make.now)
    assert decision.task_statuses[task.key] == task.status
    assert second not in decision.plans
