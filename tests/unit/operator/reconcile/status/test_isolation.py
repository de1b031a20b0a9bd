"""What nothing can be decided about is one object's affair: everybody else is decided about as if it had said nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlora_operator.reconcile import decide, plan
from mlora_operator.reconcile.admission import pipeline_view, queue
from mlora_operator.reconcile.assignment import assign, replicas
from mlora_operator.reconcile.cache import Memo
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.snapshot import Contact, Key, Snapshot, condition
from mlora_operator.reconcile.status import incremental
from mlora_operator.reconcile.workers import demand
from mlora_worker.bounds import MOST, MOST_REAL, MOST_STAGES
from mlora_worker.protocol import Report, TaskPhase
from tests.fixtures.stories import stories
from tests.unit.operator.reconcile.conftest import MODEL, NOW, Make

ODD, FINE = Key("team-a", "toy"), Key("team-b", "toy")
WORDS = "that was not foreseen"


class Odd(Exception):
    pass


def world(make: Any, odd: Contact | None = None, *, known: bool = True, **policy: Any) -> Snapshot:
    """Two pipelines of two namespaces, each with a task that trains, one that waits and one that has just come."""
    tasks, contacts = [], {}
    for key in (ODD, FINE):
        trains = {
            "pipeline": str(key),
            "run": "run-1",
            "step": 3,
            "startTime": "2026-03-01T11:00:00Z",
            "state": "Training",
            "conditions": [make.condition(one, "True") for one in ("Accepted", "Admitted", "Running")],
        }
        waits = {"pipeline": str(key), "state": "Queued", "conditions": [make.condition("Accepted", "True")]}
        tasks += [
            make.task(name, key.namespace, status=status, output={"uri": f"s3://{key.namespace}/{name}"})
            for name, status in (("trains", trains), ("waits", waits), ("new", None))
        ]
        reported = (
            make.reported("Training", "trains", key.namespace, step=4),
            make.reported("Prepared", "waits", key.namespace),
            make.reported("Preparing", "new", key.namespace),
        )
        contacts[key] = Contact(report=make.report(*reported))
    if odd is not None:
        contacts[ODD] = odd
    elif not known:
        del contacts[ODD]
    pipelines = tuple(make.pipeline("toy", key.namespace, scheduling=policy) for key in (ODD, FINE))
    group = make.group()
    return replace(
        make.snapshot(*tasks, pipelines=pipelines),
        contacts=contacts,
        groups={
            key: replace(
                group,
                pods=tuple(
                    replace(pod, key=Key(key.namespace, pod.key.name), uid=f"{key.namespace}-{pod.uid}")
                    for pod in group.pods
                ),
            )
            for key in (ODD, FINE)
        },
    )


def of(decision: Decision, namespace: str) -> dict[str, Any]:
    """All of a decision that is about one namespace."""
    return {
        "tasks": {key: one for key, one in decision.task_statuses.items() if key.namespace == namespace},
        "pipelines": {
            key: one for key, one in decision.pipeline_statuses.items() if key.namespace == namespace
        },
        "plans": {key: one for key, one in decision.plans.items() if key.namespace == namespace},
        "workers": {key: one for key, one in decision.workers.items() if key.namespace == namespace},
        "pods": [one for one in decision.delete_pods if one.key.namespace == namespace],
        "deleted": [one.key for one in decision.delete_tasks if one.key.namespace == namespace],
        "events": [one for one in decision.events if one.about.namespace == namespace],
    }


def raises_for(original: Callable[..., Any], concerns: Callable[..., bool]) -> Callable[..., Any]:
    def work(*arguments: Any, **named: Any) -> Any:
        if any(concerns(one) for one in (*arguments, *named.values())):
            raise Odd(WORDS)
        return original(*arguments, **named)

    return work


def of_odd_pipeline(argument: Any) -> bool:
    seen = getattr(argument, "view", argument)
    pipeline = getattr(seen, "pipeline", seen)
    return getattr(pipeline, "key", None) == ODD and hasattr(pipeline, "replica")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (pipeline_view, "_members"),
        (demand, "admissions"),
        (demand, "wanted_by"),
        (decide, "applicant"),
        (decide, "health"),
        (decide, "size"),
        (decide, "next_plan"),
        (decide, "known_generation"),
        (decide, "pipeline_context"),
        (decide, "pipeline_status"),
        (decide, "pods_to_delete"),
        (decide, "workers"),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__.rpartition(".")[2],
)
@pytest.mark.parametrize("remembers", [False, True])
def test_a_pipeline_about_which_something_raises_stands_apart(
    make: Any, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, remembers: bool
) -> None:
    snapshot, memo = world(make), Memo() if remembers else None
    undisturbed = decide.decide(snapshot, make.settings(), NOW, memo)
    monkeypatch.setattr(module, name, raises_for(getattr(module, name), of_odd_pipeline))
    if (module, name) == (decide, "known_generation"):  # asked only where there is no plan to send
        snapshot = replace(snapshot, contacts={**snapshot.contacts, ODD: Contact()})
    decision = decide.decide(snapshot, make.settings(), NOW, memo)

    assert of(decision, "team-b") == of(undisturbed, "team-b")
    assert [(one.kind, one.about, one.words) for one in decision.faults] == [
        ("LoRAPipeline", ODD, f"Odd: {WORDS}")
    ]
    ready = condition(decision.pipeline_statuses[ODD].conditions, "Ready")
    assert ready is not None
    assert (ready.status, ready.reason) == ("Unknown", "ReconcileError")
    assert WORDS in ready.message
    assert ODD not in decision.workers
    assert ODD not in decision.plans
    assert not of(decision, "team-a")["pods"]
    held = {task.key.name: task.status for task in snapshot.tasks if task.key.namespace == "team-a"}
    told = {key.name: one for key, one in decision.task_statuses.items() if key.namespace == "team-a"}
    assert told["trains"] is held["trains"]
    assert told["waits"] is held["waits"]
    new = condition(told["new"].conditions, "Accepted")
    assert new is not None
    assert (new.status, new.reason) == ("Unknown", "ReconcileError")
    events = [event for event in decision.events if event.about == ODD and event.kind == "LoRAPipeline"]
    assert [(event.type, event.reason) for event in events] == [("Warning", "ReconcileError")]


def test_what_stood_apart_is_decided_about_again_as_soon_as_it_can_be(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, memo = world(make), Memo()
    undisturbed = decide.decide(snapshot, make.settings(), NOW)
    with monkeypatch.context() as patched:
        patched.setattr(decide, "health", raises_for(decide.health, of_odd_pipeline))
        decide.decide(snapshot, make.settings(), NOW, memo)
    assert decide.decide(snapshot, make.settings(), NOW, memo) == undisturbed


def of_task(name: str, argument: Any) -> bool:
    key = getattr(argument, "key", None)
    return key == Key("team-a", name) and hasattr(argument, "candidate") and argument.spec is not None


TASK_STEPS = [
    (decide, "as_leaving"),
    (assign, "accept"),
    (queue, "entrant"),
    (plan, "_task_plan"),
    (incremental, "admission_message"),
    (incremental, "task_status"),
    (incremental, "overdue"),
]


@pytest.mark.parametrize(
    ("module", "name"),
    TASK_STEPS,
    ids=lambda one: one if isinstance(one, str) else one.__name__.rpartition(".")[2],
)
@pytest.mark.parametrize("which", ["waits", "new", "trains"])
def test_a_task_about_which_something_raises_stands_apart(
    make: Any, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, which: str
) -> None:
    snapshot = world(make)
    undisturbed = decide.decide(snapshot, make.settings(), NOW)
    monkeypatch.setattr(module, name, raises_for(getattr(module, name), partial(of_task, which)))
    decision = decide.decide(snapshot, make.settings(), NOW)

    assert of(decision, "team-b") == of(undisturbed, "team-b")
    assert [(one.kind, one.about.name) for one in decision.faults] == [("LoRATask", which)]
    told = decision.task_statuses[Key("team-a", which)]
    accepted = condition(told.conditions, "Accepted")
    assert accepted is not None
    assert accepted.reason == "ReconcileError"
    assert WORDS in accepted.message
    held = next(task.status for task in snapshot.tasks if task.key == Key("team-a", which))
    before = condition(held.conditions, "Accepted")
    assert accepted.status == (before.status if before is not None else "Unknown")
    assert [one for one in told.conditions if one.type != "Accepted"] == [
        one for one in held.conditions if one.type != "Accepted"
    ]
    if which != "trains":  # beside one that trains and has a size that nobody knows, nobody is let in
        others = {"trains", "waits", "new"} - {which}
        for other in others:
            key = Key("team-a", other)
            assert decision.task_statuses[key] == undisturbed.task_statuses[key]


@pytest.mark.parametrize(
    ("module", "name"),
    TASK_STEPS,
    ids=lambda one: one if isinstance(one, str) else one.__name__.rpartition(".")[2],
)
def test_a_task_that_trains_and_stands_apart_is_not_dropped_from_the_plan(
    make: Any, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    """Who is not listed is unloaded, and its training abandoned."""
    snapshot = world(make)
    sent = decide.decide(snapshot, make.settings(), NOW).plans[ODD]
    contact = replace(snapshot.contacts[ODD], sent=sent, sent_run="run-1", sent_sequence=0)
    later = replace(snapshot, contacts={**snapshot.contacts, ODD: contact})
    uid = next(task.uid for task in snapshot.tasks if task.key == Key("team-a", "trains"))
    assert uid in {task.uid for task in sent.tasks}
    monkeypatch.setattr(module, name, raises_for(getattr(module, name), partial(of_task, "trains")))
    plan = decide.decide(later, make.settings(), NOW).plans.get(ODD)
    if plan is not None:  # another one than the coordinator has
        assert {task.uid: task for task in plan.tasks}[uid] == {task.uid: task for task in sent.tasks}[uid]


def test_how_a_task_that_stands_apart_ends_is_told(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = world(make)
    report = make.report(make.reported("Succeeded", "trains", "team-a", step=50))
    snapshot = replace(snapshot, contacts={**snapshot.contacts, ODD: Contact(report=report)})
    monkeypatch.setattr(assign, "accept", raises_for(assign.accept, partial(of_task, "trains")))
    decision = decide.decide(snapshot, make.settings(), NOW)
    assert decision.task_statuses[Key("team-a", "trains")].state == "Succeeded"


def test_a_pipeline_that_stands_apart_still_holds_what_it_holds(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group that waits for a place does not take its workers for gone."""
    waits = {
        "start": {
            "lack": "Room",
            "attempts": 1,
            "again": "2026-03-01T12:10:00Z",
            "others": 2,
            "words": "full",
        },
        "observedGeneration": 1,
        "revision": "new",
    }
    snapshot = world(make)
    fine = make.pipeline("toy", "team-b", status=waits)
    snapshot = replace(
        snapshot,
        pipelines=(snapshot.pipelines[0], fine),
        groups={ODD: snapshot.groups[ODD]},
        contacts={ODD: snapshot.contacts[ODD]},
    )
    undisturbed = decide.decide(snapshot, make.settings(), NOW)
    assert undisturbed.pipeline_statuses[FINE].state == "Waiting"
    monkeypatch.setattr(decide, "health", raises_for(decide.health, of_odd_pipeline))
    monkeypatch.setattr(decide, "applicant", raises_for(decide.applicant, of_odd_pipeline))
    decision = decide.decide(snapshot, make.settings(), NOW)
    assert of(decision, "team-b") == of(undisturbed, "team-b")


def test_replicas_that_cannot_be_dealt_with_stay_as_they_are(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = world(make)
    shared = make.pipeline("toy", "team-a", replicas={"max": 3})
    snapshot = replace(snapshot, pipelines=(shared, snapshot.pipelines[1]))
    undisturbed = decide.decide(snapshot, make.settings(), NOW)

    def odd(*_: Any) -> Any:
        raise Odd(WORDS)

    monkeypatch.setattr(replicas, "_deal", odd)
    decision = decide.decide(snapshot, make.settings(), NOW)
    assert of(decision, "team-b") == of(undisturbed, "team-b")
    assert [one.about for one in decision.faults] == [ODD]


def test_the_words_of_an_error_are_short_and_on_one_line(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(*_: Any) -> Any:
        raise Odd("one\ntwo\x1b[31m" + "x" * 10_000)

    monkeypatch.setattr(decide, "health", odd)
    decision = decide.decide(world(make), make.settings(), NOW)
    for fault in decision.faults:
        assert fault.words.isprintable()
        assert len(fault.words) <= 400


# --- whatever a coordinator reports within the bounds of the types ---

UIDS = [
    f"uid-{namespace}-{name}" for namespace in ("team-a", "team-b") for name in ("trains", "waits", "new")
]
AMOUNTS = st.sampled_from([0, 1, 2, 64, 10**6, 2**31, 2**40, MOST]) | st.integers(0, MOST)
REALS = st.sampled_from([0.0, 1.5, -1.0, MOST_REAL, -MOST_REAL, 5e-324, 1e38]) | st.floats(
    -MOST_REAL, MOST_REAL, allow_nan=False
)
STAGES = st.sampled_from([0, 1, 2, 5, MOST_STAGES - 1])
WIDTHS = st.sampled_from([1, 2, 64, 4096, 2**31 - 1])
NAMES = st.sampled_from(["q_proj", "v_proj", "", ".", "a.b", "*", "q_proj.", "\u2028", "x" * 253])


def optional(strategy: Any) -> Any:
    return st.none() | strategy


DATA = st.fixed_dictionaries(
    {
        "rows": AMOUNTS,
        "used": AMOUNTS,
        "tokens": AMOUNTS,
        "dropped": st.dictionaries(NAMES.map(lambda name: name[:100]), AMOUNTS, max_size=2),
    }
)
EVALUATION = st.fixed_dictionaries(
    {"step": AMOUNTS, "loss": REALS, "tokenAccuracy": REALS, "tokens": st.integers(1, MOST)}
)
FAILURE = st.fixed_dictionaries(
    {"reason": st.just("InvalidRow"), "message": st.sampled_from(["", "x" * 2048, "\n\x00"])}
)


def _with_as_many_steps(task: dict[str, Any]) -> dict[str, Any]:
    """A report that says how many there are has none beyond."""
    if not task["totalSteps"]:
        return task
    return task | {"totalSteps": max(task["totalSteps"], task["step"], task.get("resumedStep") or 0)}


TASK = st.fixed_dictionaries(
    {
        "uid": st.sampled_from([*UIDS, "unknown", ""]),
        "phase": st.sampled_from([one.value for one in TaskPhase]),
        "step": AMOUNTS,
        "totalSteps": AMOUNTS,
        "loss": optional(REALS),
        "evaluation": optional(EVALUATION),
        "best": optional(EVALUATION),
        "tokensPerSecond": optional(REALS),
        "data": optional(DATA),
        "failure": optional(FAILURE),
        "blocked": optional(FAILURE),
        "checkpointStep": optional(AMOUNTS),
        "resumedStep": optional(AMOUNTS),
        "crowdedOut": optional(st.booleans()),
        "released": optional(st.booleans()),
        "adapter": optional(
            st.fixed_dictionaries({"uri": st.just("x" * 2048), "sha256": st.just("0" * 64), "bytes": AMOUNTS})
        ),
    }
).map(_with_as_many_steps)
MODULE = st.fixed_dictionaries(
    {
        "stage": st.sampled_from([0, 1]),
        "name": NAMES,
        "inFeatures": WIDTHS,
        "outFeatures": WIDTHS,
        "count": st.sampled_from([1, 2]),
        "path": st.sampled_from(["", "layers.*.q_proj", "*.*", "layers.q_proj", ".*.", "*"]),
        "firstLayer": st.sampled_from([0, 1]),
    }
)
FACTS = st.fixed_dictionaries(
    {
        "hiddenSize": WIDTHS,
        "intermediateSize": WIDTHS,
        "layers": st.sampled_from([3, 4, 4096]),
        "attentionHeads": WIDTHS,
        "vocabSize": WIDTHS,
        "maxPositions": WIDTHS,
        "dtypeBytes": st.integers(1, 16),
        "modules": st.lists(MODULE, max_size=4),
    }
)
STAGE = st.fixed_dictionaries(
    {
        "firstLayer": st.sampled_from([0, 1, 4095]),
        "lastLayer": st.sampled_from([0, 1, 4095]),
        "device": st.sampled_from(["cpu", "cuda:0", "", ":", "x" * 128]),
        "residentBytes": AMOUNTS,
        "capacityBytes": AMOUNTS,
        "inputGroups": st.lists(st.lists(NAMES, max_size=3), max_size=3),
    }
)
COUNTED = (
    "tokens", "squaredTokens", "supervised", "lossRows", "exactBytes", "layerBytes", "lowestGroup", "floorBytes",
    "keptBytes", "forwardBytes", "backwardBytes", "rssBytes", "usedBytes", "item",
)  # fmt: skip
SAMPLE = st.fixed_dictionaries(
    {"stage": STAGES, "calibration": st.booleans(), **dict.fromkeys(COUNTED, AMOUNTS)}
)
REPORT = st.fixed_dictionaries(
    {
        "runId": st.sampled_from(["run-1", "run-2", ""]),
        "sequence": AMOUNTS,
        "planGeneration": AMOUNTS,
        "ready": st.booleans(),
        "facts": optional(FACTS),
        "stages": st.lists(STAGE, min_size=2, max_size=2).map(
            lambda stages: [one | {"stage": number} for number, one in enumerate(stages)]
        )
        | st.just([]),
        "tasks": st.lists(TASK, max_size=6),
        "memory": st.lists(SAMPLE, max_size=12),
        "exhausted": st.lists(
            st.fixed_dictionaries({"stage": STAGES, "tasks": st.lists(st.sampled_from(UIDS), max_size=3)}),
            max_size=3,
        ),
        "wire": st.fixed_dictionaries({"tokens": AMOUNTS, "microbatches": AMOUNTS}),
    }
)


@given(
    report=REPORT,
    policy=st.sampled_from(["priority", "fairShare", "shortestRemaining"]),
)
@settings(
    max_examples=stories(300),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_no_report_within_the_bounds_changes_what_is_decided_about_others(
    report: dict[str, Any], policy: str
) -> None:
    """Three passes, each upon the statuses that the one before wished for."""
    make = Make()
    heard = Contact(report=Report.model_validate(report), progressed=NOW - timedelta(hours=1))
    without, beside = world(make, known=False, policy=policy), world(make, heard, policy=policy)
    alone, memo = Memo(), Memo()
    for _ in range(3):
        expected = decide.decide(without, make.settings(), NOW, alone)
        decision = decide.decide(beside, make.settings(), NOW, memo)
        assert decision.faults == ()
        assert of(decision, "team-b") == of(expected, "team-b")
        without, beside = after(without, expected), after(beside, decision)


def after(snapshot: Snapshot, decision: Decision) -> Snapshot:
    return replace(
        snapshot,
        tasks=tuple(
            replace(one, status=decision.task_statuses.get(one.key, one.status)) for one in snapshot.tasks
        ),
        pipelines=tuple(
            replace(one, status=decision.pipeline_statuses.get(one.key, one.status))
            for one in snapshot.pipelines
        ),
    )


def test_the_model_of_the_tests_is_the_one_that_all_tasks_ask_for() -> None:
    assert Make.model == MODEL
