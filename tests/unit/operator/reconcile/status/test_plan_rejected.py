"""What workers do not understand of a plan is said where somebody looks, and holds up nobody else's tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state import plan_refusal
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.plan_refusal import PlanRefusal, refused, taken
from mlora_operator.reconcile.state.snapshot import Contact, Key, Snapshot, condition
from mlora_worker.protocol import Plan
from tests.unit.operator.reconcile.conftest import NOW, Make

TOY = Key("team-a", "toy")
WORDS = "http://toy:8080 answered 422: the plan is not valid: "


def uid(name: str) -> str:
    return f"uid-team-a-{name}"


def world(make: Make, **phases: str | None) -> Snapshot:
    """A pipeline whose workers are up, and tasks of these phases; None: the workers have not heard of it."""
    tasks = []
    for name, phase in phases.items():
        held: dict[str, Any] = {"pipeline": "team-a/toy", "conditions": [make.condition("Accepted", "True")]}
        if phase == "Training":
            begun = [make.condition(one, "True") for one in ("Admitted", "Running")]
            held |= {"startTime": "2026-03-01T11:00:00Z", "run": "run-1", "step": 3, "state": "Training"}
            held["conditions"] += begun
        tasks.append(make.task(name, status=held, age=100 - len(tasks)))
    reported = [make.reported(phase, name, step=3) for name, phase in phases.items() if phase is not None]
    return make.snapshot(*tasks, group=make.group(), contact=Contact(report=make.report(*reported)))


def decided(make: Make, snapshot: Snapshot) -> Decision:
    return decide(snapshot, make.settings(), NOW)


def told(snapshot: Snapshot, refusal: PlanRefusal | None, **contact: Any) -> Snapshot:
    known = replace(snapshot.contacts[TOY], refused=refusal, **contact)
    return replace(snapshot, contacts={TOY: known})


def listed(decision: Decision) -> list[str]:
    return [one.name for one in decision.plans[TOY].tasks]


def of_pipeline(decision: Decision) -> tuple[str, str, str] | None:
    found = condition(decision.pipeline_statuses[TOY].conditions, "PlanRejected")
    return None if found is None else (found.status, found.reason, found.message)


def of_task(decision: Decision, name: str) -> tuple[str, str, str]:
    found = condition(decision.task_statuses[Key("team-a", name)].conditions, "Admitted")
    assert found is not None
    return found.status, found.reason, found.message


def test_a_task_that_workers_do_not_understand_is_left_out_and_told(make: Make) -> None:
    snapshot = world(make, fine="Preparing", odd=None, other=None)
    first = decided(make, snapshot)
    assert listed(first) == ["fine", "odd", "other"]
    assert of_pipeline(first) is None
    refusal = refused(None, first.plans[TOY], "run-1", WORDS + "tasks.1.lora.newest: unknown field")
    second = decided(make, told(snapshot, refusal))

    assert listed(second) == ["fine", "other"]
    state = second.task_statuses[Key("team-a", "odd")].state
    status, reason, message = of_task(second, "odd")
    assert (state, status, reason) == ("Rejected", "False", "WorkersRejectTask")
    assert "lora.newest: unknown field" in message
    assert of_task(second, "fine")[1] == "PreparingData"
    found = of_pipeline(second)
    assert found is not None
    assert found[:2] == ("True", "WorkersRejectTask")
    assert "odd (lora.newest: unknown field)" in found[2]
    assert "spec.worker.image" in found[2]
    events = {(one.about.name, one.type, one.reason) for one in second.events}
    assert {("toy", "Warning", "WorkersRejectTask"), ("odd", "Warning", "WorkersRejectTask")} <= events


def test_that_stays_so_once_the_plan_without_it_was_taken_and_until_workers_or_task_are_others(
    make: Make,
) -> None:
    snapshot = world(make, fine="Preparing", odd=None)
    plan = decided(make, snapshot).plans[TOY]
    refusal = taken(refused(None, plan, "run-1", WORDS + "tasks.1.lora.newest: unknown field"), "run-1")
    sent = plan.model_copy(update={"tasks": plan.tasks[:1]})
    known = told(snapshot, refusal, sent=sent, sent_run="run-1", sent_sequence=1)
    assert TOY not in decided(make, known).plans
    assert of_task(decided(make, known), "odd")[1] == "WorkersRejectTask"

    other = replace(known.contacts[TOY], report=make.report(make.reported("Preparing", "fine"), run="run-2"))
    again = decided(make, replace(known, contacts={TOY: other}))
    assert listed(again) == ["fine", "odd"]
    assert taken(refusal, "run-2") is None
    changed = make.task("odd", priority=7, age=99, status={"pipeline": "team-a/toy"})
    assert listed(decided(make, replace(known, tasks=(known.tasks[0], changed)))) == ["odd", "fine"]


def test_one_that_trains_keeps_what_it_was_told_last(make: Make) -> None:
    snapshot = world(make, trains="Training", fine="Preparing")
    sent = decided(make, snapshot).plans[TOY]
    raised = replace(make.task("trains", priority=7, age=100), status=snapshot.tasks[0].status)
    later = replace(snapshot, tasks=(raised, snapshot.tasks[1]))
    later = told(later, None, sent=sent, sent_run="run-1", sent_sequence=1)
    plan = decided(make, later).plans[TOY]
    refusal = refused(None, plan, "run-1", WORDS + "tasks.0.priority: Input should be less than 5")
    decision = decided(make, told(later, refusal))
    assert TOY not in decision.plans  # what it has
    assert decision.task_statuses[Key("team-a", "trains")].state == "Training"
    found = of_pipeline(decision)
    assert found is not None
    assert "trains (priority: Input should be less than 5)" in found[2]


def test_one_that_trains_and_was_told_nothing_is_never_left_out(make: Make) -> None:
    """Else it would be unloaded: the whole plan stays refused, which is said."""
    snapshot = world(make, trains="Training", new=None)
    plan = decided(make, snapshot).plans[TOY]
    refusal = refused(None, plan, "run-1", WORDS + "tasks.0.lora.newest: unknown field")
    refusal = refused(refusal, plan, "run-1", WORDS + "tasks.0.lora.newest: unknown field")
    decision = decided(make, told(snapshot, refusal))
    assert listed(decision) == ["trains", "new"]
    found = of_pipeline(decision)
    assert found is not None
    assert found[:2] == ("True", "WorkersRejectPlan")
    assert decision.task_statuses[Key("team-a", "trains")].state == "Training"
    assert of_task(decision, "new")[:2] == ("False", "WorkersRejectPlan")


def test_a_plan_that_is_refused_as_a_whole_is_told_to_all_who_wait_for_it(make: Make) -> None:
    snapshot = world(make, trains="Training", waits="Prepared", new=None)
    refusal = refused(None, Plan(generation=1), "run-1", WORDS + "newest: unknown field")
    decision = decided(make, told(snapshot, refusal))
    found = of_pipeline(decision)
    assert found is not None
    assert found[:2] == ("True", "WorkersRejectPlan")
    assert "newest: unknown field" in found[2]
    assert decision.task_statuses[Key("team-a", "trains")].state == "Training"
    for name in ("waits", "new"):
        assert decision.task_statuses[Key("team-a", name)].state == "Queued"
        assert of_task(decision, name)[:2] == ("False", "WorkersRejectPlan")
    assert of_task(decision, "new")[2].find("newest") == -1  # it may be another's


def after(snapshot: Snapshot, decision: Decision) -> Snapshot:
    pipelines = tuple(replace(one, status=decision.pipeline_statuses[one.key]) for one in snapshot.pipelines)
    return replace(snapshot, pipelines=pipelines)


@pytest.mark.parametrize("workers", ["take it", "have ended", "do not answer"])
def test_once_they_take_it_that_is_said(make: Make, workers: str) -> None:
    snapshot = world(make, waits="Prepared")
    refusal = refused(None, Plan(generation=1), "run-1", WORDS + "newest: unknown field")
    then = after(snapshot, decided(make, told(snapshot, refusal)))
    match workers:
        case "have ended":
            then = replace(then, tasks=(), contacts={}, groups={})
        case "do not answer":
            then = told(then, refusal, lost_since=NOW)
    found = of_pipeline(decided(make, then))
    assert found is not None
    expected = {"do not answer": ("True", "WorkersRejectPlan")}.get(workers, ("False", "PlanAccepted"))
    assert found[:2] == expected


def test_tasks_of_other_namespaces_are_not_named_to_a_pipelines_owner(make: Make) -> None:
    pipeline = make.pipeline(allowedNamespaces={"from": "All"})
    task = make.task("secret-project", "team-b", status={"pipeline": "team-a/toy"})
    contact = Contact(report=make.report())
    snapshot = make.snapshot(task, pipelines=(pipeline,), group=make.group(), contact=contact)
    settings = make.settings(serving={"namespaces": ["team-a"]})
    plan = decide(snapshot, settings, NOW).plans[TOY]
    refusal = refused(None, plan, "run-1", WORDS + "tasks.0.lora.newest: unknown field")
    decision = decide(told(snapshot, refusal), settings, NOW)
    found = of_pipeline(decision)
    assert found is not None
    assert found[1] == "WorkersRejectTask"
    assert "secret" not in found[2]
    assert "1 of other namespaces" in found[2]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            "tasks.0.a.b: unknown field; tasks.1.c: x; tasks.0.d: y",
            {"a": "a.b: unknown field; d: y", "b": "c: x"},
        ),
        ("2 errors for Plan\ntasks.1.generation\n  Extra inputs are not permitted", {"b": "generation"}),
        ("tasks.7.a: no such task", {}),
        ("tasks.99999999999999999999.a: no number", {}),
        ("tasks: too many", {}),
        ("subtasks.0.a: x", {}),
        ("", {}),
    ],
)
def test_who_is_named_by_the_answer(make: Make, words: str, named: Mapping[str, str]) -> None:
    plan = decided(make, world(make, a=None, b=None)).plans[TOY]
    found = refused(None, plan, "run-1", words)
    assert {uid: one.words for uid, one in found.tasks.items()} == {
        uid(name): why for name, why in named.items()
    }
    assert (found.whole is None) is bool(named)


def test_what_is_remembered_of_refused_tasks_does_not_grow_with_tasks_that_come_and_go(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_refusal, "MOST_KEPT", 3)
    plan = decided(make, world(make, odd=None)).plans[TOY]
    plans = [
        plan.model_copy(update={"tasks": (plan.tasks[0].model_copy(update={"uid": f"u-{number}"}),)})
        for number in range(9)
    ]
    found: PlanRefusal | None = None
    for one in plans:
        found = refused(found, one, "run-1", WORDS + "tasks.0.lora.newest: unknown field")
    assert found is not None
    assert [*found.tasks] == ["u-5", "u-6", "u-7", "u-8"]
    assert found.of(plans[8].tasks[0]) == "lora.newest: unknown field"
    assert {type(part) for each in found.tasks.values() for part in each} == {bytes, str}  # no rows, no keys


def test_what_a_user_wrote_names_no_other_task(make: Make) -> None:
    plan = decided(make, world(make, victim=None, odd=None)).plans[TOY]
    victim, odd = plan.tasks
    key = "q_proj|; tasks.0.lora: no such thing"
    lora = odd.lora.model_copy(update={"rank_pattern": {key: 512}})
    plan = plan.model_copy(update={"tasks": (victim, odd.model_copy(update={"lora": lora}))})
    words = f"{WORDS}tasks.1.lora.rankPattern.{key}: Input should be less than or equal to 256"
    assert [*refused(None, plan, "run-1", words).tasks] == [uid("odd")]
