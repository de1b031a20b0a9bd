"""The scheduler on real objects: who leaves, when the other may begin, and that a restarted operator sees the same."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from mlora_operator.reconcile.admission.admit import AdmissionMemo, admissions
from mlora_operator.reconcile.admission.capacity import memory_model
from mlora_operator.reconcile.admission.pipeline_view import view
from mlora_operator.reconcile.admission.workload import progress_of, served_tokens, state_of
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.snapshot import Contact, Key, Task
from mlora_operator.scheduling.admission import AdmissionOutcome
from mlora_operator.scheduling.entrant import EntrantState
from mlora_worker.protocol import DataCounts, Failure, FailureReason, Plan, TaskReport

TOY = Key("team-a", "toy")
BIG = {"batchSize": 16, "maxSeqLength": 512}
REFUSAL = Failure(reason=FailureReason.ACCESS_DENIED, message="s3://adapters/low: denied")
ROWS = DataCounts(rows=100, used=100, tokens=20_000)


def room_for_one(make: Any) -> int:
    """Bytes of a device on which one task with ``BIG`` fits, and not two."""
    tasks = tuple(make.task(name, training=BIG) for name in ("a", "b"))
    snapshot = make.snapshot(*tasks, contact=Contact(report=make.report()), group=make.group())
    model = memory_model(view(make.pipeline(), tasks, snapshot))
    assert model is not None
    one, two = (
        max(check.needed for check in model.by_stage([task.uid for task in tasks[:number]]))
        for number in (1, 2)
    )
    return int((one + two) / 2 / 0.95)


def contact(
    make: Any, *reported: TaskReport, after: Contact | None = None, sent: Plan | None = None
) -> Contact:
    """What a coordinator with room for one says, after it has taken ``sent`` or what was sent before."""
    former = after or Contact()
    sent = sent or former.sent
    sequence = former.report.sequence + 1 if former.report is not None else 1
    report = make.report(
        *reported,
        sequence=sequence,
        capacity=room_for_one(make),
        generation=sent.generation if sent is not None else 0,
    )
    return Contact(report=report, sent=sent, sent_run="run-1" if sent is not None else None)


def decision(make: Any, *tasks: Task, contact: Contact, age: float = 0, **pipeline: Any) -> Decision:
    snapshot = make.snapshot(
        *tasks, group=make.group(), contact=contact, pipelines=(make.pipeline(**pipeline),)
    )
    settings = make.settings(serving={"namespaces": ["team-a"]})
    return decide(snapshot, settings, make.now + timedelta(seconds=age))


def admitted(plan: Plan | None) -> dict[str, bool]:
    assert plan is not None
    return {task.name: task.admitted for task in plan.tasks}


def pair(make: Any, **low: Any) -> tuple[Task, Task]:
    return make.task("low", training=BIG, **low), make.task("high", training=BIG, priority=5)


def test_a_higher_task_gets_the_place_once_the_lower_one_is_out_and_that_one_comes_back(make: Any) -> None:
    low, high = pair(make)
    training = contact(make, make.reported("Training", "low", step=7), make.reported("Prepared", "high"))
    leave = decision(make, low, high, contact=training).plans[TOY]
    assert admitted(leave) == {"high": False, "low": False}

    leaving = contact(
        make, make.reported("Training", "low", step=8), make.reported("Prepared", "high"), sent=leave
    )
    assert TOY not in decision(make, low, high, contact=leaving).plans  # nothing new until it is out

    out = contact(
        make, make.reported("Preempted", "low", step=8), make.reported("Prepared", "high"), after=leaving
    )
    begin = decision(make, low, high, contact=out).plans[TOY]
    assert admitted(begin) == {"high": True, "low": False}
    assert out.report is not None

    # Until the worker has begun, its report says what it said before: that changes nothing.
    told = replace(out, sent=begin, sent_sequence=out.report.sequence)
    assert TOY not in decision(make, low, high, contact=told).plans

    done = contact(
        make, make.reported("Preempted", "low", step=8), make.reported("Succeeded", "high"), sent=begin
    )
    assert admitted(decision(make, low, high, contact=done).plans[TOY]) == {"high": False, "low": True}


def test_a_restarted_operator_decides_the_same(make: Any) -> None:
    low, high = pair(make, status={"conditions": [make.condition("Admitted", "False", "Preempted")]})
    training = contact(make, make.reported("Training", "low"), make.reported("Prepared", "high"))
    assert admitted(decision(make, low, high, contact=training).plans[TOY]) == {"high": False, "low": False}


def test_one_of_equal_priority_waits(make: Any) -> None:
    tasks = make.task("old", training=BIG), make.task("new", training=BIG, age=1)
    training = contact(make, make.reported("Training", "new"), make.reported("Prepared", "old"))
    assert admitted(decision(make, *tasks, contact=training).plans[TOY]) == {"old": False, "new": True}


def test_one_that_saves_is_left_alone(make: Any) -> None:
    low, high = pair(make)
    saving = contact(make, make.reported("Saving", "low"), make.reported("Prepared", "high"))
    assert admitted(decision(make, low, high, contact=saving).plans[TOY]) == {"high": False, "low": True}


def test_a_changed_priority_counts_at_the_next_decision(make: Any) -> None:
    low, high = pair(make)
    raised = make.task("low", training=BIG, priority=6)
    training = contact(make, make.reported("Training", "low"), make.reported("Prepared", "high"))
    assert admitted(decision(make, raised, high, contact=training).plans[TOY]) == {"low": True, "high": False}
    assert admitted(decision(make, low, high, contact=training).plans[TOY]) == {"high": False, "low": False}


def test_a_suspended_task_leaves_with_its_steps_and_is_not_forgotten(make: Any) -> None:
    task = make.task("low", suspend=True, training=BIG)
    sent = Plan(generation=1, tasks=(_planned(make, "low", admitted=True),))
    training = contact(make, make.reported("Training", "low", step=7), sent=sent)
    leave = decision(make, task, contact=training)
    assert admitted(leave.plans[TOY]) == {"low": False}
    assert leave.workers[TOY].replicas == 2
    out = contact(make, make.reported("Preempted", "low", step=7), sent=leave.plans[TOY])
    after = decision(make, task, contact=out)
    assert TOY not in after.plans  # it is still in the plan
    assert after.pipeline_statuses[TOY].idle_since is not None  # but nobody needs the workers
    back = decision(make, make.task("low", training=BIG), contact=out)
    assert admitted(back.plans[TOY]) == {"low": True}


@pytest.mark.parametrize("secrets", [{}, {Key("team-a", "keys"): None}])
def test_nor_by_an_operator_that_has_just_started(make: Any, secrets: dict[Key, None]) -> None:
    """It may hold steps that its store has refused so far, and that are forgotten with it."""
    keys = {"secretRef": {"name": "keys"}}
    task = make.task("low", suspend=True, storage=keys, status={"pipeline": "team-a/toy", "step": 7})
    out = Contact(report=make.report(make.reported("Preempted", "low", step=7, blocked=REFUSAL)))
    snapshot = make.snapshot(task, make.task("next"), contact=out, group=make.group(), secrets=secrets)
    plan = decide(snapshot, make.settings(), make.now).plans[TOY]
    assert admitted(plan) == {"low": False, "next": False}


def test_a_suspended_task_that_never_trained_is_forgotten(make: Any) -> None:
    sent = Plan(generation=1, tasks=(_planned(make, "low", admitted=False),))
    prepared = contact(make, make.reported("Prepared", "low"), sent=sent)
    assert admitted(decision(make, make.task("low", suspend=True), contact=prepared).plans[TOY]) == {}


def test_the_room_of_a_suspended_task_is_free_once_it_is_out(make: Any) -> None:
    tasks = make.task("low", training=BIG, suspend=True), make.task("next", training=BIG)
    leaving = contact(make, make.reported("Training", "low"), make.reported("Prepared", "next"))
    assert admitted(decision(make, *tasks, contact=leaving).plans[TOY]) == {"low": False, "next": False}
    out = contact(make, make.reported("Preempted", "low"), make.reported("Prepared", "next"))
    assert admitted(decision(make, *tasks, contact=out).plans[TOY]) == {"low": False, "next": True}


def test_places_tell_who_leaves_for_whom(make: Any) -> None:
    low, high = pair(make)
    suspended = make.task("off", suspend=True)
    said = contact(
        make,
        make.reported("Training", "low"),
        make.reported("Prepared", "high"),
        make.reported("Training", "off"),
    )
    tasks = (low, high, suspended)
    crew = view(make.pipeline(), tasks, make.snapshot(*tasks, group=make.group(), contact=said))
    found = admissions(crew, make.now, AdmissionMemo())
    assert found[low.uid].outcome is AdmissionOutcome.PREEMPTED
    assert str(found[low.uid].displaced_by) == "team-a/high"
    assert found[suspended.uid].outcome is AdmissionOutcome.SUSPENDED
    assert found[high.uid].after is not None


@pytest.mark.parametrize(
    ("story", "phase", "sent", "status", "expected"),
    [
        ("waits", "Prepared", None, {}, EntrantState.WAITING),
        ("was told that it may", "Prepared", True, {}, EntrantState.STARTING),
        ("was told by a former operator", "Prepared", None, "True", EntrantState.STARTING),
        ("was told otherwise since", "Prepared", False, "True", EntrantState.WAITING),
        ("trains", "Training", True, {}, EntrantState.RUNNING),
        ("trains for a former operator", "Training", None, "False", EntrantState.RUNNING),
        ("was told to leave", "Training", False, {}, EntrantState.LEAVING),
        ("is out", "Preempted", False, {}, EntrantState.WAITING),
        ("was let in again", "Preempted", True, "False", EntrantState.STARTING),
        ("saves, whatever it was told", "Saving", False, {}, EntrantState.SAVING),
        ("has no rows yet", "Preparing", True, {}, None),
        ("is done", "Succeeded", True, {}, None),
        ("was put out for want of memory", "Preempted crowded", True, {}, EntrantState.WAITING),
        ("was, before its checkpoint is written", "Training crowded", True, {}, EntrantState.WAITING),
        ("was, before its first step", "Prepared crowded", True, {}, EntrantState.WAITING),
        ("is done, but its store refuses it", "Saving blocked", True, {}, None),
        ("trains on though its checkpoint is refused", "Training blocked", True, {}, EntrantState.RUNNING),
        (
            "is out though its checkpoint is refused",
            "Training blocked released",
            False,
            {},
            EntrantState.WAITING,
        ),
        ("is out, and was let in again", "Training blocked released", True, {}, EntrantState.STARTING),
        ("was let in, but its checkpoint cannot be fetched", "Preempted blocked", True, {}, None),
    ],
)
def test_where_a_task_stands(
    make: Any, story: str, phase: str, sent: bool | None, status: Any, expected: EntrantState | None
) -> None:
    conditions = {"conditions": [make.condition("Admitted", status)]} if status else {}
    task = make.task("low", status=conditions)
    plan = Plan(generation=1, tasks=(_planned(make, "low", admitted=sent),)) if sent is not None else None
    phase, *words = phase.split()
    more = {
        "crowded_out": "crowded" in words or None,
        "released": "released" in words or None,
        "blocked": REFUSAL if "blocked" in words else None,
    }
    said = contact(make, make.reported(phase, "low", **more), sent=plan)
    crew = view(make.pipeline(), (task,), make.snapshot(task, group=make.group(), contact=said))
    assert state_of(crew, task) is expected, story


@pytest.mark.parametrize("phase", ["Preempted", "Training"])
def test_one_that_the_worker_put_out_waits_and_a_higher_one_gets_the_room(make: Any, phase: str) -> None:
    """It was told that it may train, but the worker lets it in only once it was told otherwise, or another one has left.
    As long as it counts as one that begins, the higher one cannot have the room: it cannot be told to leave."""
    ran = {"conditions": [make.condition("Admitted", "True"), make.condition("Running", "True", "Training")]}
    low, high = pair(make, status={**ran, "run": "run-1"})
    sent = Plan(generation=1, tasks=(_planned(make, "low", admitted=True),))
    out = contact(
        make,
        make.reported(phase, "low", step=7, crowded_out=True),
        make.reported("Prepared", "high"),
        sent=sent,
    )
    decided = decision(make, low, high, contact=out)
    assert admitted(decided.plans[TOY]) == {"high": True, "low": False}
    status = decided.task_statuses[low.key]
    assert status.state == "Preempted"
    said = {one.type: (one.status, one.message) for one in status.conditions}
    assert said["Preempted"] == (
        "True",
        "memory ran out because other tasks use it, or have not released it yet",
    )
    assert said["Running"][0] == "False"


@pytest.mark.parametrize(
    ("phase", "released", "priority", "state"),
    [
        ("Saving", None, 0, "UploadBlocked"),  # as a former worker says it
        ("Saving", True, 0, "UploadBlocked"),
        ("Training", True, 5, "Preempted"),
    ],
)
def test_what_a_store_refuses_holds_no_memory(
    make: Any, phase: str, released: bool | None, priority: int, state: str
) -> None:
    """Neither an adapter nor the checkpoint of one that leaves: the next task trains meanwhile."""
    ran = {"conditions": [make.condition("Admitted", "True"), make.condition("Running", "True", "Training")]}
    first = make.task("low", training=BIG, status={**ran, "run": "run-1"})
    following = make.task("high", training=BIG, priority=priority, age=1)
    sent = Plan(generation=1, tasks=(_planned(make, "low", admitted=phase == "Saving"),))
    refused = contact(
        make,
        make.reported(phase, "low", step=8, blocked=REFUSAL, released=released),
        make.reported("Prepared", "high"),
        sent=sent,
    )
    limit = {"namespaceLimits": {"training": 1}}
    decided = decision(make, first, following, contact=refused, **limit)
    assert admitted(decided.plans[TOY]) == {"high": True, "low": False}
    status = decided.task_statuses[first.key]
    said = {one.type: (one.status, one.reason) for one in status.conditions}
    assert status.state == state
    assert said["UploadBlocked"] == ("True", "AccessDenied")
    assert said["Admitted"][0] == "False"


def test_one_whose_checkpoint_cannot_be_fetched_holds_no_memory_and_comes_when_it_can(make: Any) -> None:
    back, following = make.task("low", training=BIG), make.task("high", training=BIG, age=1)
    sent = Plan(generation=1, tasks=(_planned(make, "low", admitted=True),))
    prepared = make.reported("Prepared", "high")
    refused = contact(make, make.reported("Preempted", "low", step=8, blocked=REFUSAL), prepared, sent=sent)
    decided = decision(make, back, following, contact=refused)
    assert admitted(decided.plans[TOY]) == {"low": False, "high": True}
    status = decided.task_statuses[back.key]
    assert (status.state, status.reason) == ("Queued", "WaitingForStore")
    fetched = contact(make, make.reported("Preempted", "low", step=8), prepared, after=refused)
    assert admitted(decision(make, back, following, contact=fetched).plans[TOY])["low"]


@pytest.mark.parametrize(
    ("phase", "released", "minutes", "replaced"),
    [
        ("Saving", True, 59, False),
        ("Saving", True, 60, True),
        ("Training", True, 60, True),
        ("Training", None, 60, False),  # it trains on
    ],
)
def test_workers_that_are_to_be_replaced_wait_for_a_store_for_an_hour(
    make: Any, phase: str, released: bool | None, minutes: int, replaced: bool
) -> None:
    held = {"conditions": [make.condition("UploadBlocked", "True", "AccessDenied")]}
    task = make.task("low", status=held, suspend=bool(released) and phase == "Training")
    refused = contact(make, make.reported(phase, "low", step=8, blocked=REFUSAL, released=released))
    snapshot = make.snapshot(task, group=make.group(revision="old"), contact=refused)
    decided = decide(snapshot, make.settings(), make.now + timedelta(minutes=minutes))
    assert (TOY in decided.workers) is replaced


def test_what_trained_is_taken_to_train_on_while_nobody_answers(make: Any) -> None:
    task = make.task("low")
    said = replace(contact(make, make.reported("Training", "low")), lost_since=make.now)
    crew = view(make.pipeline(), (task,), make.snapshot(task, group=make.group(), contact=said))
    assert state_of(crew, task) is EntrantState.RUNNING


def test_who_has_waited_for_hold_back_is_passed_by_nobody(make: Any) -> None:
    """A small task is let in past a big one, until that has waited for as long as the pipeline says."""
    since = {"conditions": [make.condition("Admitted", "False", since=make.now)]}
    tasks = (
        make.task("trains", training={"batchSize": 8, "maxSeqLength": 512}, age=99),
        make.task("big", training=BIG, age=50, status=since),
        make.task("small", training={"batchSize": 1, "maxSeqLength": 512}, age=1),
    )
    said = contact(
        make,
        make.reported("Training", "trains"),
        make.reported("Prepared", "big"),
        make.reported("Prepared", "small"),
    )
    scheduling = {"holdBack": "5m"}
    early = decision(make, *tasks, contact=said, age=299, scheduling=scheduling)
    late = decision(make, *tasks, contact=said, age=300, scheduling=scheduling)
    assert admitted(early.plans[TOY]) == {"trains": True, "big": False, "small": True}
    assert admitted(late.plans[TOY]) == {"trains": True, "big": False, "small": False}


def test_the_pipeline_says_by_which_policy(make: Any) -> None:
    tasks = make.task("long", training=BIG, age=50), make.task("short", training=BIG, age=1)
    said = contact(
        make,
        make.reported("Prepared", "long", total_steps=90, data=ROWS),
        make.reported("Prepared", "short", total_steps=60, data=ROWS),
    )
    by_age = decision(make, *tasks, contact=said)
    by_length = decision(make, *tasks, contact=said, scheduling={"policy": "shortestRemaining"})
    assert admitted(by_age.plans[TOY]) == {"long": True, "short": False}
    assert admitted(by_length.plans[TOY]) == {"long": False, "short": True}


def _finished(make: Any, namespace: str, ago: float = 0, steps: int = 50) -> Task:
    end = (make.now - timedelta(seconds=ago)).strftime("%Y-%m-%dT%H:%M:%SZ")
    status = {
        "conditions": [make.condition("Succeeded", "True")],
        "pipeline": "team-a/toy",
        "step": steps,
        "totalSteps": steps,
        "data": ROWS.model_dump(by_alias=True),
        "startTime": end,
        "completionTime": end,
    }
    return make.task("done", namespace, training={"batchSize": 4}, status=status)


def test_fair_share_looks_back_at_finished_tasks(make: Any) -> None:
    tasks = (
        make.task("first", "team-a", training=BIG, age=50),
        make.task("second", "team-b", training=BIG, age=1),
        _finished(make, "team-a", steps=50),
        _finished(make, "team-b", steps=10),
    )
    said = contact(
        make, make.reported("Prepared", "first"), make.reported("Prepared", "second", namespace="team-b")
    )
    everybody = {"allowedNamespaces": {"from": "All"}}
    fair = decision(make, *tasks, contact=said, scheduling={"policy": "fairShare"}, **everybody)
    weighed = decision(
        make,
        *tasks,
        contact=said,
        scheduling={"policy": "fairShare", "weights": {"team-a": 6}},
        **everybody,
    )
    assert admitted(fair.plans[TOY]) == {"first": False, "second": True}
    assert admitted(weighed.plans[TOY]) == {"first": True, "second": False}


@pytest.mark.parametrize(
    ("ago", "half_life", "part"), [(0, 3600, 1.0), (3600, 3600, 0.5), (7200, 3600, 0.25), (10, 0, 0.0)]
)
def test_what_was_served_counts_less_with_time(make: Any, ago: float, half_life: int, part: float) -> None:
    done = _finished(make, "team-a", ago)
    pipeline = make.pipeline(scheduling={"policy": "fairShare"})
    several = make.task("t", "team-a"), make.task("t", "team-b")  # of one namespace, nothing is counted
    crew = view(pipeline, several, make.snapshot(done, pipelines=(pipeline,)))
    served = served_tokens(crew, timedelta(seconds=half_life), make.now)
    assert served["team-a"] == pytest.approx(part * 50 * 4 * 200)


def test_progress_comes_from_the_report_else_from_the_status(make: Any) -> None:
    task = _finished(make, "team-a")
    crew = view(make.pipeline(), (task,), make.snapshot(task))
    assert progress_of(crew, task).served_tokens == 50 * 4 * 200
    said = make.reported("Training", "done", step=10, data=DataCounts(rows=9, used=2, tokens=100))
    heard = view(make.pipeline(), (task,), make.snapshot(task, contact=Contact(report=make.report(said))))
    progress = progress_of(heard, task)
    assert (progress.step, progress.remaining_steps, progress.step_tokens) == (10, 40, 100)  # 2 rows, not 4


def _planned(make: Any, name: str, *, admitted: bool) -> Any:
    """An entry of a plan as the operator makes it."""
    said = Contact(report=make.report(make.reported("Prepared", name)))
    snapshot = make.snapshot(make.task(name), group=make.group(), contact=said)
    (entry,) = decide(snapshot, make.settings(), make.now).plans[TOY].tasks
    return entry.model_copy(update={"admitted": admitted})


def test_one_that_comes_back_waits_until_what_was_left_behind_is_free_and_never_fails_for_it(
    make: Any,
) -> None:
    low = make.task("low", training=BIG)
    said = contact(make, make.reported("Preempted", "low", step=7))
    assert said.report is not None
    room = said.report.stages[0].capacity_bytes
    lingers = replace(said, report=said.report.model_copy(update={"held": (0, room)}))
    decided = decision(make, low, contact=lingers)
    assert admitted(decided.plans[TOY]) == {"low": False}
    told = {
        one.type: (one.status, one.reason, one.message) for one in decided.task_statuses[low.key].conditions
    }
    status, reason, message = told["Admitted"]
    assert (status, reason) == ("False", "WaitingForMemory")
    assert "tasks that have left the pipeline still use some of its memory" in message
    assert "Failed" not in told
    assert admitted(decision(make, low, contact=said).plans[TOY]) == {"low": True}
