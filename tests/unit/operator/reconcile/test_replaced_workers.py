"""A changed configuration reaches the workers, and what the former ones say is not taken for the new ones' word."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from mlora_operator.manifests.statefulset import lineage
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.snapshot import Contact, Key, Pipeline, Task, WorkerGroup, condition
from mlora_worker.protocol import ExpertShape, Plan
from tests.fixtures.toy_facts import toy_facts

TOY = Key("team-a", "toy")


def contact_of(make: Any, *reported: Any, told: Plan | None = None, sequence: int = 9) -> Contact:
    report = make.report(*reported, sequence=sequence, generation=1 if told is None else told.generation)
    sent = told or Plan(generation=1, tasks=())
    return Contact(report=report, sent=sent, sent_run=report.run_id, sent_sequence=sequence - 1)


def decided(
    make: Any, *tasks: Task, group: WorkerGroup, contact: Contact, pipeline: Pipeline | None = None
) -> Decision:
    changed = pipeline or make.pipeline(generation=2, status={"observedGeneration": 2})
    snapshot = make.snapshot(*tasks, pipelines=(changed,), group=group, contact=contact)
    return decide(snapshot, make.settings(), make.now)


def waiting(make: Any, name: str) -> Task:
    held = [make.condition("Accepted", "True"), make.condition("Admitted", "False", "PipelineUpdating")]
    task: Task = make.task(name, status={"pipeline": "team-a/toy", "conditions": held})
    return task


def trains(make: Any, name: str) -> Task:
    held = [make.condition(one, "True") for one in ("Accepted", "Admitted", "Running")]
    task: Task = make.task(name, status={"pipeline": "team-a/toy", "run": "run-1", "conditions": held})
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
    running = trains(make, "t2")
    waits = waiting(make, "t3")
    contact = contact_of(make, make.reported("Training", "t2", step=1), make.reported("Prepared", "t3"))
    first = decided(make, running, waits, group=group, contact=contact)
    assert (admitted(first), first.delete_pods) == (["t2"], ())

    done = contact_of(
        make, make.reported("Succeeded", "t2"), make.reported("Prepared", "t3"), told=first.plans[TOY]
    )
    second = decided(make, running, waits, group=group, contact=done)
    assert admitted(second) == []
    assert len(second.delete_pods) == 2


def test_those_who_wait_for_new_workers_do_not_wait_for_a_clock_that_was_ahead(make: Any) -> None:
    tasks = trains(make, "t1"), waiting(make, "t2")
    contact = contact_of(make, make.reported("Training", "t1"), make.reported("Prepared", "t2"))
    status = {"observedGeneration": 2, "updatingSince": "2026-03-02T12:00:00Z"}
    changed = make.pipeline(generation=2, status=status)
    decision = decided(make, *tasks, group=make.group(revision="old"), contact=contact, pipeline=changed)
    assert decision.pipeline_statuses[TOY].updating_since == "2026-03-01T12:00:00Z"
    assert decision.pipeline_statuses[TOY].update == "Pending"


def test_a_task_is_not_judged_by_the_model_that_was_replaced(make: Any) -> None:
    """It would be failed for good."""
    former = toy_facts(max_positions=128)
    known = {"observedGeneration": 1, "facts": former.model_dump(mode="json", by_alias=True)}
    changed = make.pipeline(generation=2, status=known, model={"uri": "s3://models/other"})
    long = make.task("long", training={"maxSeqLength": 1024})
    report = make.report(make.reported("Prepared", "long")).model_copy(update={"facts": former})
    contact = Contact(report=report)
    for group in (make.group(revision="old"), make.group(revision="new", pod_revision="old")):
        decision = decided(make, long, group=group, contact=contact, pipeline=changed)
        assert decision.task_statuses[long.key].state == "Queued"
        status = decision.pipeline_statuses[TOY]
        assert (status.observed_generation, status.facts, status.stages) == (2, None, ())
        changed = replace(changed, status=status)
    decision = decided(
        make, long, group=make.group(ready=0), contact=Contact(starting=True), pipeline=changed
    )
    assert decision.task_statuses[long.key].state == "Pending"
    decision = decided(make, long, group=make.group(), contact=contact, pipeline=changed)
    assert decision.task_statuses[long.key].state == "Failed", "it is judged by the model that it has now"
    assert decision.pipeline_statuses[TOY].facts == former


@pytest.mark.parametrize("path", [None, "model.layers.*.mlp.experts"])
def test_an_adapter_of_experts_is_not_judged_by_what_workers_told_that_knew_none(
    make: Any, path: str | None
) -> None:
    """Between two starts of the workers came an upgrade. The task would be failed for good."""
    experts = ExpertShape(stage=0, first_layer=0, count=1, experts=8, active=2, width=64, path=path)
    former = make.facts().model_copy(update={"experts": (experts,)})
    known = {
        "observedGeneration": 1,
        "facts": former.model_dump(mode="json", by_alias=True),
        "stages": [stage.model_dump(mode="json", by_alias=True) for stage in make.stages()],
    }
    lora = {"targetParameters": ["experts.down_proj"], "targetModules": []}
    task = make.task("t1", lora=lora)
    decision = decided(
        make, task, group=make.group(ready=0), contact=Contact(starting=True),
        pipeline=make.pipeline(status=known),
    )  # fmt: skip
    assert decision.task_statuses[task.key].state == "Pending"


def test_what_is_known_of_a_model_stays_known_while_only_the_image_is_replaced(make: Any) -> None:
    facts, stages = make.facts(), make.stages()
    known = {
        "observedGeneration": 1,
        "facts": facts.model_dump(mode="json", by_alias=True),
        "stages": [one.model_dump(mode="json", by_alias=True) for one in stages],
    }
    pipeline = make.pipeline(status=known)
    long = make.task("long", training={"maxSeqLength": facts.max_positions + 1})
    decision = decided(
        make, long, group=make.group(pod_revision="old"), contact=contact_of(make), pipeline=pipeline
    )
    assert decision.task_statuses[long.key].state == "Failed"
    assert decision.pipeline_statuses[TOY].facts == facts


def test_a_task_that_is_suspended_leaves_workers_that_are_to_be_replaced(make: Any) -> None:
    changed = make.pipeline(generation=2, model={"uri": "s3://models/other"})
    task = make.task("t1", suspend=True, status={"pipeline": "team-a/toy", "run": "run-1"})
    contact = contact_of(
        make, make.reported("Training", "t1", step=3), make.reported("Training", "t2", step=3)
    )
    stays = make.task("t2", status={"pipeline": "team-a/toy", "run": "run-1"})
    decision = decided(make, task, stays, group=make.group(revision="old"), contact=contact, pipeline=changed)
    assert admitted(decision) == ["t2"]
    assert {one.name for one in decision.plans[TOY].tasks} == {"t1", "t2"}


def of_lineage(group: WorkerGroup, lineage_: str) -> WorkerGroup:
    return replace(group, pods=tuple(replace(pod, lineage=lineage_) for pod in group.pods))


def trains_and_waits(make: Any) -> tuple[tuple[Task, Task], Contact]:
    contact = contact_of(make, make.reported("Training", "t1", step=3), make.reported("Prepared", "t2"))
    return (trains(make, "t1"), waiting(make, "t2")), contact


def test_those_who_wait_get_new_workers_after_a_while_and_who_trained_goes_on_there(make: Any) -> None:
    tasks, contact = trains_and_waits(make)
    pipeline = make.pipeline(generation=2, status={"observedGeneration": 2})
    assert pipeline.spec is not None
    group = of_lineage(make.group(revision="old"), lineage(pipeline.spec))

    def after(minutes: float, group: WorkerGroup, *tasks: Task) -> Decision:
        nonlocal pipeline
        snapshot = make.snapshot(*tasks, pipelines=(pipeline,), group=group, contact=contact)
        decision = decide(snapshot, make.settings(), make.now + timedelta(minutes=minutes))
        pipeline = replace(pipeline, status=decision.pipeline_statuses.get(TOY, pipeline.status))
        return decision

    first = after(0, group, *tasks)
    assert (TOY in first.workers, first.delete_pods) == (False, ())
    assert pipeline.status.updating_since == make.now.strftime("%Y-%m-%dT%H:%M:%SZ")
    told = condition(first.task_statuses[tasks[1].key].conditions, "Admitted")
    assert told is not None
    assert "after 10m" in told.message

    alone = after(1, group, tasks[0])
    assert (TOY in alone.workers, pipeline.status.updating_since) == (False, None), "nobody waits any more"

    after(2, group, *tasks)
    assert (TOY in after(11.9, group, *tasks).workers) is False
    over = after(12, group, *tasks)
    assert (over.workers[TOY].replicas, over.delete_pods) == (2, ()), "first the StatefulSet has the new one"

    updated = of_lineage(make.group(revision="new", pod_revision="old"), lineage(pipeline.spec))
    replaced = after(12.1, updated, *tasks)
    assert len(replaced.delete_pods) == 2
    assert admitted(replaced) == ["t1"], "what trains is not told to leave: it goes on from its checkpoint"

    anew = after(14, make.group(), *tasks)
    assert (anew.delete_pods, pipeline.status.updating_since) == ((), None)
    assert sorted(admitted(anew)) == ["t1", "t2"]


@pytest.mark.parametrize(
    "fields",
    [
        {"model": {"uri": "s3://models/other"}},
        {"model": {"dtype": "float32"}},
        {"model": {"quantization": {"type": "nf4"}}},
        {"checkpoints": {"uri": "s3://elsewhere/checkpoints"}},
    ],
)
def test_nobody_is_interrupted_whose_checkpoints_the_new_workers_would_not_take(
    make: Any, fields: dict[str, Any]
) -> None:
    tasks, contact = trains_and_waits(make)
    former = make.pipeline().spec
    assert former is not None
    group = of_lineage(make.group(revision="old"), lineage(former))
    since = {"observedGeneration": 2, "updatingSince": "2026-01-01T00:00:00Z"}
    for changed, rolls in (
        (make.pipeline(status=since, **fields), False),
        (make.pipeline(status=since), True),
    ):
        decision = decided(make, *tasks, group=group, contact=contact, pipeline=changed)
        assert (TOY in decision.workers) is rolls
        waits = decision.task_statuses[tasks[1].key]
        assert (waits.reason, decision.delete_pods) == ("PipelineUpdating", ())
