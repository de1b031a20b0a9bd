"""No task is given to other workers while those that had it may still train it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlora_operator.manifests.names import LABEL_PIPELINE, REPLICA_HASH, REPLICA_NUMBER, REPLICA_OF, selector
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.snapshot import Contact, Key, Pipeline, Snapshot, Task, WorkerGroup
from mlora_worker.protocol import Plan

TOY, SECOND = Key("team-a", "toy"), Key("team-a", "second")
MARKS = {REPLICA_OF: "toy", REPLICA_NUMBER: "1", REPLICA_HASH: "x"}
NONE = {"allowedNetworks": ["10.0.0.0/99"]}  # a spec that is not understood


def bound(make: Any, *conditions: tuple[str, str], pipeline: str = "team-a/toy") -> Task:
    held = [make.condition(*one) for one in conditions]
    task: Task = make.task(status={"pipeline": pipeline, "run": "run-1", "step": 20, "conditions": held})
    return task


def training(make: Any, **fields: Any) -> Task:
    return bound(make, ("Accepted", "True"), ("Admitted", "True"), ("Running", "True"), **fields)


def beside_another(
    make: Any, task: Task, *first: Pipeline, group: WorkerGroup | None, contact: Contact | None = None
) -> Decision:
    """What is decided while another pipeline, which would serve the task, is up and has its rows."""
    other = Contact(report=make.report(make.reported("Prepared"), run="other", sequence=9))
    groups = {SECOND: make.group()} | ({TOY: group} if group is not None else {})
    snapshot = Snapshot(
        tasks=(task,),
        pipelines=(*first, make.pipeline("second", age=10)),
        groups=groups,
        contacts={SECOND: other} | ({TOY: contact} if contact is not None else {}),
        revisions={TOY: "new", SECOND: "new"},
    )
    return decide(snapshot, make.settings(), make.now)


def is_left_alone(decision: Decision, task: Task) -> bool:
    assert not decision.plans or all(one.uid != task.uid for one in decision.plans[SECOND].tasks)
    return decision.task_statuses[task.key] == task.status


def is_moved(decision: Decision, task: Task) -> bool:
    return decision.task_statuses[task.key].pipeline == str(SECOND)


@pytest.mark.parametrize(
    ("story", "first"),
    [
        ("its spec is not understood", lambda make: (make.pipeline(worker=NONE),)),
        ("it is being deleted", lambda make: (replace(make.pipeline(), deleting=True),)),
        ("it is gone, its pods are not yet", lambda _: ()),
    ],
)
def test_a_task_waits_for_the_workers_of_a_pipeline_that_cannot_be_asked(
    make: Any, story: str, first: Any
) -> None:
    there, gone = make.group(), None
    for task in (training(make), bound(make, ("Accepted", "True"), ("Admitted", "False"))):
        assert is_left_alone(beside_another(make, task, *first(make), group=there), task), story
        assert is_moved(beside_another(make, task, *first(make), group=gone), task), story


def test_pods_that_have_no_node_train_nothing(make: Any) -> None:
    task, pods = training(make), tuple(replace(pod, placed=False) for pod in make.group().pods)
    decision = beside_another(make, task, group=WorkerGroup(replicas=0, revision="", pods=pods))
    assert is_moved(decision, task)


def test_a_pipeline_that_serves_another_model_now_keeps_a_task_until_its_workers_are_rid_of_it(
    make: Any,
) -> None:
    task, renamed = training(make), make.pipeline(model={"name": "Org/Other"})
    trains = Contact(report=make.report(make.reported("Training"), sequence=5))
    decision = beside_another(make, task, renamed, group=make.group(), contact=trains)
    assert is_left_alone(decision, task)
    assert decision.plans[TOY].tasks == (), "it is told to let the task go"
    rid = Contact(report=make.report(sequence=6))
    assert is_moved(beside_another(make, task, renamed, group=make.group(), contact=rid), task)


def test_the_pods_of_a_pipeline_with_a_long_name_are_known_by_their_label(make: Any) -> None:
    name = "a.pipeline." + "x" * 80
    task = training(make, pipeline=f"team-a/{name}")
    label = Key("team-a", selector(name)[LABEL_PIPELINE])
    snapshot = Snapshot(
        tasks=(task,), pipelines=(make.pipeline("second"),), groups={label: make.group(replicas=2)}
    )
    assert decide(snapshot, make.settings(), make.now).task_statuses[task.key] == task.status


def test_tasks_of_a_replica_stay_there_while_nobody_can_deal_them(make: Any) -> None:
    """The pipeline whose replica it is has a spec that is not understood."""
    replica = make.pipeline("toy-replica-1", annotations=MARKS)
    task = bound(make, ("Accepted", "True"), ("Admitted", "True"), pipeline="team-a/toy-replica-1")
    decision = beside_another(make, task, make.pipeline(worker=NONE), replica, group=None)
    assert decision.task_statuses[task.key].pipeline == "team-a/toy-replica-1"


def test_tasks_of_a_replica_that_was_given_up_move_once_its_pods_are_gone(make: Any) -> None:
    """They write their checkpoints, and perhaps an adapter, to the end."""
    given_up = {"givenUp": "RestartLimitReached", "observedGeneration": 1, "state": "Failed"}
    head = make.pipeline(replicas={"min": 2, "max": 2}, status=given_up)
    replica = make.pipeline("toy-replica-1", annotations=MARKS)
    second = replica.key
    task = bound(make, ("Accepted", "True"), ("Admitted", "False"), ("Running", "False"))
    up = make.report(run="other", sequence=7)
    ending = tuple(replace(pod, deleting=True, ready=False) for pod in make.group().pods)
    for pods, where in ((ending, str(head.key)), ((), str(second))):
        snapshot = Snapshot(
            tasks=(task,),
            pipelines=(head, replica),
            groups={TOY: WorkerGroup(replicas=0, revision="new", pods=pods), second: make.group()},
            contacts={second: Contact(report=up, sent=Plan(generation=1, tasks=()), sent_run="other")},
            revisions={TOY: "new", second: "new"},
        )
        decision = decide(snapshot, make.settings(), make.now)
        assert decision.task_statuses[task.key].pipeline == where
        planned = [one.uid for one in decision.plans[second].tasks] if second in decision.plans else []
        assert (task.uid in planned) is (where == str(second))


def test_a_replica_that_somebody_made_wrong_gets_no_tasks_and_is_put_right(make: Any) -> None:
    head = make.pipeline(replicas={"min": 2, "max": 2})
    wrong = make.pipeline("toy-replica-1", annotations=MARKS, worker=NONE)
    tasks = [make.task(f"t{number}", status={"pipeline": "team-a/toy-replica-1"}) for number in range(3)]
    snapshot = Snapshot(tasks=tuple(tasks), pipelines=(head, wrong), revisions={TOY: "new"})
    decision = decide(snapshot, make.settings(), make.now)
    assert {status.pipeline for status in decision.task_statuses.values()} == {"team-a/toy"}
    assert [one["metadata"]["name"] for one in decision.new_pipelines] == ["toy-replica-1"]
