"""A changed configuration reaches the workers, and what the former ones say is not taken for the new ones' word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.decision import Decision
from mlora_operator.reconcile.snapshot import Contact, Group, Key, Pipeline, Task
from mlora_worker.protocol import Plan

TOY = Key("team-a", "toy")


def contact_of(make: Any, *reported: Any, told: Plan | None = None, sequence: int = 9) -> Contact:
    report = make.report(*reported, sequence=sequence, generation=1 if told is None else told.generation)
    sent = told or Plan(generation=1, tasks=())
    return Contact(report=report, sent=sent, sent_run=report.run_id, sent_sequence=sequence - 1)


def decided(
    make: Any, *tasks: Task, group: Group, contact: Contact, pipeline: Pipeline | None = None
) -> Decision:
    changed = pipeline or make.pipeline(generation=2, status={"observedGeneration": 2})
    snapshot = make.snapshot(*tasks, pipelines=(changed,), group=group, contact=contact)
    return decide(snapshot, make.settings(), make.now)


def waiting(make: Any, name: str) -> Task:
    held = [make.condition("Accepted", "True"), make.condition("Admitted", "False", "PipelineUpdating")]
    task: Task = make.task(name, status={"pipeline": "team-a/toy", "conditions": held})
    return task


def admitted(decision: Decision) -> list[str]:
    return [one.name for plan in decision.plans.values() for one in plan.tasks if one.admitted]


@pytest.mark.parametrize(
    ("story", "group"),
    [
        ("the group has the former configuration", {"revision": "old"}),
        ("the group has the new one, its pods do not", {"revision": "new", "pod_revision": "old"}),
    ],
)
def test_nobody_is_let_in_to_workers_of_a_former_configuration(
    make: Any, story: str, group: dict[str, str]
) -> None:
    task = waiting(make, "t2")
    contact = contact_of(make, make.reported("Prepared", "t2"))
    decision = decided(make, task, group=make.group(**group), contact=contact)
    assert admitted(decision) == [], story
    assert decision.workers[TOY].replicas == 2
    assert decision.task_statuses[task.key].reason == "PipelineUpdating"
    anew = decided(make, task, group=make.group(), contact=contact)
    assert admitted(anew) == ["t2"]


def test_nor_to_one_that_is_ending(make: Any) -> None:
    pods = tuple(replace(pod, deleting=True, ready=False, revision="old") for pod in make.group().pods)
    ending = replace(make.group(), pods=pods)
    contact = contact_of(make, make.reported("Prepared", "t2"))
    assert admitted(decided(make, waiting(make, "t2"), group=ending, contact=contact)) == []


def test_workers_are_replaced_though_tasks_never_stop_coming(make: Any) -> None:
    """One got to work just before they were replaced; it is the last one."""
    group = make.group(revision="new", pod_revision="old")
    running = make.task(
        "t2",
        status={
            "pipeline": "team-a/toy",
            "run": "run-1",
            "conditions": [make.condition(one, "True") for one in ("Accepted", "Admitted", "Running")],
        },
    )
    waits = waiting(make, "t3")
    trains = contact_of(make, make.reported("Training", "t2", step=1), make.reported("Prepared", "t3"))
    first = decided(make, running, waits, group=group, contact=trains)
    assert (admitted(first), first.delete_pods) == (["t2"], ())

    done = contact_of(
        make, make.reported("Succeeded", "t2"), make.reported("Prepared", "t3"), told=first.plans[TOY]
    )
    second = decided(make, running, waits, group=group, contact=done)
    assert admitted(second) == []
    assert len(second.delete_pods) == 2
