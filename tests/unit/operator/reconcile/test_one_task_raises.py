"""Whatever raises about one task, in whichever function that a pass asks about it, is that task's affair alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.memory.model import Demand
from mlora_operator.reconcile import decide
from mlora_operator.reconcile.admission.deleted_tasks import DeletedTasks
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.isolation import culprits
from mlora_operator.reconcile.state.snapshot import Contact, Key, Snapshot, Task, condition
from mlora_operator.scheduling.entrant import Entrant
from mlora_operator.scheduling.order import Candidate
from mlora_worker.protocol import LoRAConfig, TaskPlan, TaskReport, TrainingSpec
from tests.fixtures.raising import WORDS, Name, asked_about, raising
from tests.unit.operator.reconcile.conftest import NOW, Make

ROOMS = (
    "mlora_operator.reconcile",
    "mlora_operator.scheduling",
    "mlora_operator.memory",
    "mlora_operator.manifests",
    "mlora_operator.api",
    "mlora_operator.rights",
    "mlora_worker.stream",
    "mlora_worker.protocol",
    "mlora_worker.addresses",
)
ODD, UID, RANK, LENGTH = Key("team-a", "odd"), "uid-team-a-odd", 13, 77
# What catches, and what remembers.
GUARDS = {
    "Isolation.try_task",
    "Memoized.keep",
    "Memoized.known",
    "TaskStatuses.of",
    "_Judge.acceptance",
    "_as_judged",
}
# Who a task is, and whether it trains: nothing can be said without. Its pipeline stays as it is.
IDENTITY = {"Contact.keeps", "Contact.trains", "PipelineView.reported", "candidate", "sort_key"}
# Of a task's entry in the plan, where this operator has told its workers nothing yet.
UNTELLABLE = {
    "PipelineView.may_have_keys_of", "_counted", "_digest", "_of_task", "_parts", "_task_plan", "_text_of", "dataset_text",
    "template_text", "storage_access", "Contact.texts_of", "TrainingSpec.for_model",
}  # fmt: skip


def concerns(one: Any) -> bool:
    match one:
        case Task():
            return one.key == ODD
        case Candidate() | TaskReport() | TaskPlan() | Entrant():
            return one.uid == UID
        case LoRAConfig():
            return one.rank == RANK
        case Demand() | LoRATaskSpec():
            return one.lora.rank == RANK
        case TrainingSpec():
            return one.max_seq_length == LENGTH
        case str():
            return one == UID
    return False


def task(make: Make, name: str, namespace: str, phase: str | None, **spec: Any) -> Task:
    trained = {"run": "run-1", "step": 3, "startTime": "2026-03-01T11:00:00Z"}
    held: dict[str, Any] | None = {"pipeline": f"{namespace}/toy", "state": "Queued"}
    assert held is not None
    match phase:
        case "Training" | "Saving":
            held |= trained | {"state": phase}
            true = ("Accepted", "Admitted", "Running")
        case "Preempted":
            held |= trained
            true = ("Accepted", "Preempted")
        case "Prepared":
            true = ("Accepted",)
        case _:
            held, true = None, ()
    if held is not None:
        held["conditions"] = [make.condition(one, "True") for one in true]
    return make.task(name, namespace, status=held, output={"uri": f"s3://{namespace}/{name}"}, **spec)


def world(make: Make, phase: str | None, pipeline: dict[str, Any], **odd: Any) -> Snapshot:
    """A pipeline for each of two namespaces, with a task that trains, one that waits and one that prepares. The first has
    the odd one, too, and another pipeline for the same model."""
    tasks, contacts, groups = [], {}, {}
    for namespace in ("team-a", "team-b"):
        own = [("trains", "Training"), ("waits", "Prepared"), ("new", "Preparing")]
        tasks += [task(make, name, namespace, phase) for name, phase in own]
        if namespace == ODD.namespace:
            lengths = {"maxSeqLength": LENGTH}
            tasks.append(task(make, "odd", namespace, phase, lora={"rank": RANK}, training=lengths, **odd))
            own += [("odd", phase)] if phase is not None else []
        steps = {"Training": 4, "Saving": 4, "Preempted": 4}
        reported = (make.reported(phase, name, namespace, step=steps.get(phase, 0)) for name, phase in own)
        contacts[Key(namespace, "toy")] = Contact(report=make.report(*reported))
        pods = (
            replace(pod, key=Key(namespace, pod.key.name), uid=f"{namespace}-{pod.uid}")
            for pod in make.group().pods
        )
        groups[Key(namespace, "toy")] = replace(make.group(), pods=tuple(pods))
    known = {
        "facts": make.facts().model_dump(by_alias=True, mode="json"),
        "stages": [one.model_dump(by_alias=True, mode="json") for one in make.stages()],
        "observedGeneration": 1,
    }
    pipelines = (
        *(make.pipeline("toy", namespace, **pipeline) for namespace in ("team-a", "team-b")),
        make.pipeline("other", "team-a", age=100, status=known),
    )
    return replace(make.snapshot(*tasks, pipelines=pipelines), contacts=contacts, groups=groups)


WORLDS: dict[str, tuple[str | None, dict[str, Any], dict[str, Any]]] = {
    "one that has just come": (None, {"namespaceLimits": {"waiting": 50, "training": 50}}, {}),
    "one that prepares": ("Preparing", {"replicas": {"max": 3, "tasksPerReplica": 50}}, {}),
    "one that waits": ("Prepared", {"replicas": {"max": 3, "tasksPerReplica": 50}}, {}),
    "one that waits for its fair share": ("Prepared", {"scheduling": {"policy": "fairShare"}}, {}),
    "one that was preempted": ("Preempted", {"scheduling": {"policy": "shortestRemaining"}}, {}),
    "one that is late": ("Prepared", {}, {"startDeadlineSeconds": 1}),
    "one that trains": ("Training", {}, {}),
    "one that saves": ("Saving", {}, {}),
}


def of_others(decision: Decision) -> dict[str, Any]:
    """All of a decision that is not about the odd one; of pipelines, what does not count tasks."""
    return {
        "tasks": {key: one for key, one in decision.task_statuses.items() if key != ODD},
        "plans": {
            key: {one.uid: one for one in plan.tasks if one.uid != UID}
            for key, plan in decision.plans.items()
        },
        "pipelines": {
            key: (one.state, [(each.type, each.status, each.reason) for each in one.conditions])
            for key, one in decision.pipeline_statuses.items()
        },
        "workers": {key: one.replicas for key, one in decision.workers.items()},
        "made": (
            decision.new_pipelines,
            decision.delete_pipelines,
            decision.delete_pods,
            decision.delete_tasks,
        ),
        "events": [one for one in decision.events if one.about != ODD],
    }


def snapshot_of(make: Make, name: str) -> Snapshot:
    phase, pipeline, odd = WORLDS[name]
    return world(make, phase, pipeline, **odd)


def decided(make: Make, name: str) -> Decision:
    return decide.decide(snapshot_of(make, name), make.settings(), NOW)


def in_turn(make: Make, name: str) -> Any:
    """Every function that is asked about the odd task, and what is decided when it raises."""
    settings, snapshot = make.settings(), snapshot_of(make, name)
    asked = asked_about(ROOMS, concerns, lambda: decide.decide(snapshot, settings, NOW))
    assert len(asked) > 50
    for one in asked:
        if one[1] not in GUARDS:
            snapshot = snapshot_of(make, name)  # of new objects: nothing is known of them
            with raising(ROOMS, one, concerns) as times:
                decision = decide.decide(snapshot, settings, NOW)
            if times[0]:
                yield one, decision


def told(decision: Decision) -> tuple[str, str]:
    accepted = condition(decision.task_statuses[ODD].conditions, "Accepted")
    assert accepted is not None
    return accepted.reason, accepted.message


def is_about_the_odd_one(decision: Decision, function: Name) -> bool:
    """The only fault is of the task, and its condition says so."""
    if function[1] == "state_of":  # who asks does not need it
        return not decision.faults
    reason, message = told(decision)
    found = [(one.kind, one.about) for one in decision.faults]
    return found == [("LoRATask", ODD)] and reason == "ReconcileError" and WORDS in message


@pytest.mark.parametrize(
    "name", [name for name in WORLDS if name not in ("one that trains", "one that saves")]
)
def test_neighbours_of_a_task_that_does_not_train_see_nothing_of_it(make: Make, name: str) -> None:
    undisturbed = of_others(decided(make, name))
    for function, decision in in_turn(make, name):
        if function[1] in IDENTITY and decision.faults[0].kind == "LoRAPipeline":
            continue
        assert of_others(decision) == undisturbed, function
        assert is_about_the_odd_one(decision, function), function


@pytest.mark.parametrize("name", ["one that trains", "one that saves"])
def test_beside_one_that_trains_whose_size_is_not_known_all_others_train_on(make: Make, name: str) -> None:
    """And whoever waits is told why nobody is admitted, and where to look. If the size is known, nothing changes at all."""
    undisturbed, held_up = of_others(decided(make, name)), 0
    waits, trains = Key("team-a", "waits"), Key("team-a", "trains")
    for function, decision in in_turn(make, name):
        if function[1] in IDENTITY and decision.faults[0].kind == "LoRAPipeline":
            continue
        assert is_about_the_odd_one(decision, function), function
        if Key("team-a", "toy") not in decision.plans:  # without it, the task would be unloaded
            assert function[1] in UNTELLABLE, function
            continue
        plan = {one.uid: one for one in decision.plans[Key("team-a", "toy")].tasks}
        assert plan[UID].admitted, function
        others = of_others(decision)
        if others != undisturbed:
            held_up += 1
            admitted = condition(decision.task_statuses[waits].conditions, "Admitted")
            assert admitted is not None
            assert (admitted.status, admitted.reason) == ("False", "WaitingForMemory"), function
            assert "how much memory team-a/odd takes" in admitted.message, function
            for each in (others, undisturbed):
                each["tasks"] = {key: one for key, one in each["tasks"].items() if key != waits}
                each["plans"][Key("team-a", "toy")].pop("uid-team-a-waits", None)
                each["events"] = [one for one in each["events"] if one.about != waits]
            assert decision.task_statuses[trains].state == "Training"
        assert others == undisturbed, function
        undisturbed = of_others(decided(make, name))
    assert held_up


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_what_cannot_be_said_of_a_task_at_all_concerns_no_other_pipeline(make: Make, name: str) -> None:
    undisturbed = of_others(decided(make, name))
    for function, decision in in_turn(make, name):
        if function[1] in IDENTITY:
            others = of_others(decision)
            for part in ("tasks", "plans", "pipelines", "workers"):
                for key, one in undisturbed[part].items():
                    assert key.namespace == "team-a" or others[part][key] == one, (function, part)
            assert decision.faults, function


def test_when_every_task_of_a_pipeline_raises_the_pipeline_goes_on(make: Make) -> None:
    """Also where it has several: each is told, and the pipeline is not called broken."""
    name = "one that waits"
    every = ("mlora_operator.memory.model", "demand_of")

    def everybodys(one: Any) -> bool:
        return isinstance(one, LoRAConfig)

    snapshot, settings = snapshot_of(make, name), make.settings()
    with raising(ROOMS, every, everybodys):
        decision = decide.decide(snapshot, settings, NOW)
    assert {one.kind for one in decision.faults} == {"LoRATask"}
    ready = condition(decision.pipeline_statuses[Key("team-a", "toy")].conditions, "Ready")
    assert ready is not None
    assert (ready.status, ready.reason) == ("True", "Ready")
    assert decision.task_statuses[Key("team-a", "trains")].state == "Training"


class Together(Exception):
    pass


@pytest.mark.parametrize("count", [3, 5, 40, 100])
@pytest.mark.parametrize("at", [0, 1, -1])
def test_who_raises_only_beside_others_is_found(make: Make, count: int, at: int) -> None:
    tasks = [make.task(f"t{number}") for number in range(count)]
    odd, tries = tasks[at], 0

    def work(some: tuple[Task, ...]) -> None:
        nonlocal tries
        tries += 1
        if odd in some and len(some) > 1:
            raise Together

    assert set(culprits(tasks, work)) == {odd.key}
    assert tries < count + 60


def test_of_two_that_raise_together_the_one_that_has_trained_stays(make: Make) -> None:
    begun = make.task("begun", status={"startTime": "2026-03-01T11:00:00Z"})
    new = make.task("new")

    def work(some: tuple[Task, ...]) -> None:
        if len(some) > 1:
            raise Together

    assert set(culprits([begun, new], work)) == {new.key}
    assert set(culprits([new, begun], work)) == {new.key}


def test_what_raises_without_any_task_is_nobodys(make: Make) -> None:
    def work(_: tuple[Task, ...]) -> None:
        raise Together

    assert culprits([make.task("a"), make.task("b")], work) == {}


def test_a_deleted_task_of_which_nothing_can_be_said_ends_no_pass(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    seen = DeletedTasks()
    gone = task(make, "odd", "team-a", "Training")
    seen.seen([gone], ["team-a/toy"], NOW)
    with raising(ROOMS, ("mlora_operator.reconcile.admission.workload", "served_by_status"), concerns):
        assert seen.seen([], ["team-a/toy"], NOW) == {}
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert seen.seen([], ["team-a/toy"], NOW) == {}
