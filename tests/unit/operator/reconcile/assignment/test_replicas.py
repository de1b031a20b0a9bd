"""Pipelines that share the tasks of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.api.pipeline import Replicas
from mlora_operator.manifests.names import NAME_LIMIT, replica_name
from mlora_operator.reconcile.admission.capacity import memory_model
from mlora_operator.reconcile.admission.pipeline_view import view
from mlora_operator.reconcile.assignment.replicas import wanted
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.decode import read_pipeline
from mlora_operator.reconcile.state.snapshot import Contact, Key, Pipeline, Snapshot, Task, WorkerGroup
from mlora_worker.protocol import Plan

TOY, SECOND, THIRD = (Key("team-a", name) for name in ("toy", "toy-replica-1", "toy-replica-2"))
SPEC = {"replicas": {"max": 3, "tasksPerReplica": 4}, "idleTimeout": "5m"}


class World:
    """The API server's pipelines, and what the operator would do about tasks."""

    def __init__(self, make: Any, **spec: Any) -> None:
        self.make = make
        self.raw = {TOY: make.raw_pipeline(**{**SPEC, **spec})}
        self.groups: dict[Key, WorkerGroup] = {}
        self.contacts: dict[Key, Contact] = {}

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        return tuple(map(read_pipeline, self.raw.values()))

    def up(self, *keys: Key, trains: Sequence[str] = ()) -> None:
        """Their workers run; the coordinators have taken a plan without tasks, and reported since."""
        for key in keys:
            report = self.make.report(*(self.make.reported("Training", name) for name in trains), sequence=7)
            sent = Plan(generation=1, tasks=())
            self.groups[key] = self.make.group()
            self.contacts[key] = Contact(report=report, sent=sent, sent_run=report.run_id, sent_sequence=6)

    def snapshot(self, *tasks: Task) -> Snapshot:
        return Snapshot(
            tasks=tasks,
            pipelines=self.pipelines,
            groups=self.groups,
            contacts=self.contacts,
            revisions=dict.fromkeys(self.raw, "new"),
        )

    def decide(self, *tasks: Task) -> Decision:
        return decide(self.snapshot(*tasks), self.make.settings(), self.make.now)

    def make_pipelines(self, decision: Decision) -> None:
        for manifest in decision.new_pipelines:
            meta = manifest["metadata"]
            made = self.make.raw_pipeline(
                meta["name"], meta["namespace"], annotations=meta["annotations"], **manifest["spec"]
            )
            assert made["spec"] == manifest["spec"], "nothing is added to what it was given"
            self.raw[Key(meta["namespace"], meta["name"])] = made


def tasks_of(make: Any, number: int, at: Key | None = None, **fields: Any) -> list[Task]:
    status = {"pipeline": str(at)} if at is not None else {}
    return [make.task(f"t{index:02}", age=100 - index, status=status, **fields) for index in range(number)]


def where(decision: Decision) -> Mapping[str, str | None]:
    return {key.name: status.pipeline for key, status in decision.task_statuses.items()}


def moved(make: Any, tasks: Sequence[Task], decision: Decision) -> list[Task]:
    """The tasks as they are once their statuses were written."""
    at = where(decision)
    return [
        make.task(task.key.name, age=100 - int(task.key.name[1:]), status={"pipeline": at[task.key.name]})
        for task in tasks
    ]


def running(make: Any) -> dict[str, Any]:
    return {"conditions": [make.condition("Admitted", "True"), make.condition("Running", "True", "Training")]}


def crowded(
    make: Any, budget: str | None = None, full: Key = TOY, other: Key = SECOND, **spec: Any
) -> tuple[World, list[Task]]:
    """Two members: a big task trains at the one that is ``full``, where another big one waits, and a small one at the
    ``other``."""
    memory = {"memory": {"budget": budget, "margin": 0}} if budget else {}
    world = World(make, replicas={"min": 2, "max": 2}, **memory, **spec)
    world.make_pipelines(world.decide())
    world.up(TOY, SECOND)
    wide = {"batchSize": 8, "maxSeqLength": 512}
    waiting = [make.condition("Accepted", "True"), make.condition("Admitted", "False", "WaitingForMemory")]
    tasks = [
        make.task("big", training=wide, status={"pipeline": str(full), "run": "run-1", **running(make)}),
        make.task("wait", training=wide, status={"pipeline": str(full), "conditions": waiting}),
        make.task(
            "small",
            training={"batchSize": 1, "maxSeqLength": 512},
            status={"pipeline": str(other), "run": "run-1", **running(make)},
        ),
    ]
    said = {full: (("Training", "big"), ("Prepared", "wait")), other: (("Training", "small"),)}
    for key, phases in said.items():
        report = make.report(*(make.reported(*phase) for phase in phases), sequence=7)
        world.contacts[key] = replace(world.contacts[key], report=report)
    return world, tasks


def room_for(make: Any, *names: str) -> str:
    """Bytes of a device with room for these of ``crowded`` together, and little more."""
    world, tasks = crowded(make)
    crew = view(world.pipelines[0], tuple(tasks), world.snapshot(*tasks))
    model = memory_model(crew)
    assert model is not None
    uids = [task.uid for task in tasks if task.key.name in names]
    return str(max(check.needed for check in model.by_stage(uids)))


def test_a_task_that_waits_for_memory_moves_to_a_member_with_room_and_stays_there(make: Any) -> None:
    world, (big, wait, small) = crowded(make, room_for(make, "wait", "small"))
    assert where(world.decide(big, wait, small))["wait"] == str(SECOND)
    # While its rows are prepared there, it does not come back to where fewer are.
    preparing = [make.condition("Accepted", "True"), make.condition("Admitted", "False", "PreparingData")]
    wait = make.task(
        "wait",
        training={"batchSize": 8, "maxSeqLength": 512},
        status={"pipeline": str(SECOND), "conditions": preparing},
    )
    more = [
        make.task(
            name,
            training={"batchSize": 1, "maxSeqLength": 512},
            status={"pipeline": str(SECOND), "run": "run-1", **running(make)},
        )
        for name in ("tiny", "minute")
    ]
    world.raw[SECOND]["spec"]["memory"]["budget"] = world.raw[TOY]["spec"]["memory"]["budget"] = "8Gi"
    report = make.report(
        *(make.reported("Training", name) for name in ("small", "tiny", "minute")), sequence=8
    )
    world.contacts[SECOND] = replace(world.contacts[SECOND], report=report)
    world.contacts[TOY] = replace(world.contacts[TOY], report=make.report(sequence=8))
    assert where(world.decide(wait, small, *more))["wait"] == str(SECOND)


@pytest.mark.parametrize(
    "reason", ["it does not fit there either", "another one waits there", "its namespace is at its limit"]
)
def test_a_task_that_waits_for_memory_stays_where_it_would_wait_elsewhere_too(make: Any, reason: str) -> None:
    full = reason == "it does not fit there either"
    budget = room_for(make, "wait") if full else room_for(make, "wait", "small")
    world, tasks = crowded(make, budget)
    if reason == "another one waits there":
        held = {
            "pipeline": str(SECOND),
            "conditions": tasks[1].status.model_dump(by_alias=True)["conditions"],
        }
        tasks.append(make.task("other", age=99, training={"batchSize": 8, "maxSeqLength": 512}, status=held))
    if reason == "its namespace is at its limit":
        for raw in world.raw.values():
            raw["spec"]["namespaceLimits"] = {"training": 1}
    assert where(world.decide(*tasks))["wait"] == str(TOY)


@pytest.mark.parametrize("files", [False, True])
def test_one_that_is_too_large_keeps_nobody_from_the_member_that_it_is_at(make: Any, files: bool) -> None:
    """It is in no memory, and goes before nobody."""
    spec = {"checkpoints": {"uri": "file:///checkpoints"}} if files else {}
    world, tasks = crowded(make, room_for(make, "wait", "small"), SECOND, TOY, **spec)
    large = [make.condition("Accepted", "True"), make.condition("Admitted", "False", "ExceedsCapacity")]
    step = {"step": 3} if files else {}
    status = {"pipeline": str(TOY), "conditions": large, **step}
    tasks.append(make.task("huge", age=99, training={"batchSize": 512, "maxSeqLength": 512}, status=status))
    found = where(world.decide(*tasks))
    assert (found["wait"], found["huge"]) == (str(TOY), str(TOY))


@pytest.mark.parametrize(("age", "at"), [(99, SECOND), (1, TOY)])
def test_one_that_waits_where_its_files_are_goes_before_younger_ones_alone(
    make: Any, age: int, at: Key
) -> None:
    files = {"checkpoints": {"uri": "file:///checkpoints"}}
    world, tasks = crowded(make, room_for(make, "wait", "small"), SECOND, TOY, **files)
    held = {"conditions": [make.condition("Admitted", "False", "WaitingForMemory")], "step": 3}
    there = {"pipeline": str(TOY), **held}
    tasks.append(make.task("bound", age=age, training={"batchSize": 8, "maxSeqLength": 512}, status=there))
    found = where(world.decide(*tasks))
    assert (found["wait"], found["bound"]) == (str(at), str(TOY))


@pytest.mark.parametrize(
    ("there", "unfinished", "members"),
    [
        (1, 0, 1),
        (1, 4, 1),
        (1, 5, 2),
        (2, 5, 2),
        (2, 4, 2),  # no fewer before a fourth of a share is to spare
        (2, 3, 1),
        (3, 100, 3),
        (3, 8, 3),
        (3, 7, 2),
        (3, 0, 1),
    ],
)
def test_members_follow_the_tasks(there: int, unfinished: int, members: int) -> None:
    assert wanted(Replicas(max=3, tasks_per_replica=4), there, unfinished) == members


@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 9), st.integers(1, 20), st.integers(0, 200))
def test_the_number_of_members_settles_within_its_bounds(
    least: int, more: int, share: int, there: int, unfinished: int
) -> None:
    replicas = Replicas(min=least, max=least + more, tasks_per_replica=share)
    now = wanted(replicas, there, unfinished)
    assert replicas.min <= now <= replicas.max
    assert wanted(replicas, now, unfinished) == now
    assert now * share >= min(unfinished, replicas.max * share), "each has its share at most"


def test_a_long_queue_makes_replicas_with_the_same_spec(make: Any) -> None:
    world = World(make, microbatchTokens=512)
    assert world.decide(*tasks_of(make, 4)).new_pipelines == ()
    made = world.decide(*tasks_of(make, 9)).new_pipelines
    assert [one["metadata"]["name"] for one in made] == [SECOND.name, THIRD.name]
    assert all(one["spec"]["microbatchTokens"] == 512 for one in made)
    assert all("replicas" not in one["spec"] for one in made)
    (owner,) = made[0]["metadata"]["ownerReferences"]
    assert (owner["name"], owner["uid"], owner["controller"]) == ("toy", "uid-team-a-toy", True)


def test_a_changed_spec_reaches_the_replicas(make: Any) -> None:
    world = World(make)
    tasks = tasks_of(make, 9)
    world.make_pipelines(world.decide(*tasks))
    assert world.decide(*tasks).new_pipelines == ()
    world.raw[TOY] = make.raw_pipeline(**SPEC, microbatchTokens=512)
    assert len(world.decide(*tasks).new_pipelines) == 2
    world.raw[TOY] = make.raw_pipeline(**SPEC | {"replicas": {"max": 3, "tasksPerReplica": 3}})
    assert world.decide(*tasks).new_pipelines == (), "how many there are is no affair of a replica's"


def test_a_foreign_pipeline_with_a_replicas_name_is_left_alone(make: Any) -> None:
    world = World(make)
    world.raw[SECOND] = make.raw_pipeline(
        SECOND.name, model={"name": "Other/Model", "uri": "s3://models/other"}
    )
    made = world.decide(*tasks_of(make, 5))
    assert [one["metadata"]["name"] for one in made.new_pipelines] == [THIRD.name]
    assert made.delete_pipelines == ()


def test_a_replica_that_is_not_up_gets_the_last_task_alone(make: Any) -> None:
    world = World(make)
    tasks = tasks_of(make, 9)
    world.make_pipelines(world.decide(*tasks))
    found = where(world.decide(*tasks))
    assert {name for name, at in found.items() if at == str(THIRD)} == {"t08"}
    assert {name for name, at in found.items() if at == str(SECOND)} == {"t07"}
    assert Counter(found.values())[str(TOY)] == 7


def test_tasks_are_dealt_evenly_in_their_order_and_then_stay(make: Any) -> None:
    world = World(make)
    tasks = tasks_of(make, 9)
    world.make_pipelines(world.decide(*tasks))
    world.up(TOY, SECOND, THIRD)
    first = world.decide(*tasks)
    found = where(first)
    assert Counter(found.values()) == {str(TOY): 3, str(SECOND): 3, str(THIRD): 3}
    assert {found[f"t0{index}"] for index in range(3)} == set(map(str, (TOY, SECOND, THIRD)))
    for _ in range(3):
        tasks = moved(make, tasks, world.decide(*tasks))
        assert where(world.decide(*tasks)) == found


def test_waiting_tasks_move_to_who_has_fewer(make: Any) -> None:
    world = World(make)
    tasks = tasks_of(make, 9, at=TOY)
    world.make_pipelines(world.decide(*tasks))
    world.up(TOY, SECOND, THIRD)
    counts = Counter(where(world.decide(*tasks)).values())
    assert max(counts.values()) - min(counts.values()) <= 2
    assert len(counts) == 3


@pytest.mark.parametrize(
    "reason",
    [
        "trains",
        "told",
        "suspended",
        "not heard since",
        "unreachable",
        "a volume of its own",
        "admitted",
        "a new operator",
        "not heard yet",
    ],
)
def test_what_may_not_move_stays(make: Any, reason: str) -> None:
    """All tasks but one are at the first member, which has too many; the one is there, too, and must stay."""
    spec: dict[str, Any] = {}
    if reason == "a volume of its own":
        spec["checkpoints"] = {"uri": "file:///checkpoints"}
    world = World(make, **spec)
    tasks = tasks_of(make, 9, at=TOY)
    status: dict[str, Any] = {"pipeline": str(TOY)}
    if reason == "a volume of its own":
        status["step"] = 3
    if reason == "admitted":
        status["conditions"] = [make.condition("Admitted", "True")]
    tasks[8] = make.task("t08", age=1, status=status, suspend=reason == "suspended")
    world.make_pipelines(world.decide(*tasks))
    world.up(TOY, trains=["t08"] if reason == "trains" else ())
    contact = world.contacts[TOY]
    if reason == "told":
        one = world.decide(*tasks).plans[TOY].tasks[0]
        admitted = one.model_copy(update={"uid": tasks[8].uid, "admitted": True})
        world.contacts[TOY] = replace(contact, sent=Plan(generation=2, tasks=(admitted,)))
    if reason == "not heard since":
        world.contacts[TOY] = replace(contact, sent_sequence=7)
    if reason == "a new operator":
        told = make.report(*(make.reported("Prepared", task.key.name) for task in tasks))
        world.contacts[TOY] = Contact(report=told)
    if reason == "not heard yet":
        world.contacts[TOY] = Contact()
    if reason == "unreachable":
        world.contacts[TOY] = replace(contact, lost_since=make.now)
    world.up(SECOND, THIRD)
    found = where(world.decide(*tasks))
    assert found["t08"] == str(TOY)
    if reason in ("not heard since", "unreachable", "a new operator", "not heard yet"):
        assert set(found.values()) == {str(TOY)}, "that is so for all of them"
    if reason != "a volume of its own":
        return
    tasks[8] = make.task("t08", age=1, status={"pipeline": str(TOY)})
    assert where(world.decide(*tasks))["t08"] != str(TOY), "without a step it has nothing there"


@pytest.mark.parametrize("told", ["trains", "may begin", "knows of it"])
def test_a_task_is_where_it_trains_though_its_status_says_otherwise(make: Any, told: str) -> None:
    """A status is written after a plan is sent, or not at all while the API server is away."""
    world = World(make, storage={}, replicas={"max": 2, "tasksPerReplica": 4})
    tasks = tasks_of(make, 6, at=TOY)
    world.make_pipelines(world.decide(*tasks))
    world.up(TOY)
    world.up(SECOND, trains=["t00"] if told == "trains" else ())
    if told != "trains":
        (one, *_) = world.decide(*tasks).plans[TOY].tasks
        of_it = one.model_copy(update={"uid": tasks[0].uid, "admitted": told == "may begin"})
        world.contacts[SECOND] = replace(world.contacts[SECOND], sent=Plan(generation=2, tasks=(of_it,)))
    assert where(world.decide(*tasks))["t00"] == str(SECOND)
    if told != "trains":
        return
    tasks[0] = make.task(
        "t00", age=100, status={"pipeline": str(TOY)}, storage={"secretRef": {"name": "gone"}}
    )
    assert where(world.decide(*tasks))["t00"] == str(SECOND), "nor is it thrown out for anything"


def test_a_task_that_never_fits_starts_no_replica_and_keeps_none(make: Any) -> None:
    world = World(make, replicas={"min": 2, "max": 2, "tasksPerReplica": 4})
    world.make_pipelines(world.decide())
    tasks = tasks_of(make, 4)
    huge = make.task(
        "t99",
        age=1,
        status={
            "pipeline": str(SECOND),
            "conditions": [make.condition("Admitted", "False", "ExceedsCapacity")],
        },
    )
    found = where(world.decide(*tasks, huge))
    assert found["t99"] == str(TOY)
    assert found["t03"] == str(SECOND), "one that wants workers starts them"


def test_tasks_leave_a_replica_whose_pods_have_no_node(make: Any) -> None:
    world = World(make)
    tasks = tasks_of(make, 9)
    world.make_pipelines(world.decide(*tasks))
    world.up(TOY, SECOND, THIRD)
    tasks = moved(make, tasks, world.decide(*tasks))
    pods = tuple(replace(pod, placed=False, ready=False) for pod in make.group().pods)
    world.groups[SECOND] = WorkerGroup(2, "new", pods=pods)
    world.contacts[SECOND] = replace(world.contacts[SECOND], lost_since=make.now)
    assert Counter(where(world.decide(*tasks)).values())[str(SECOND)] == 1, (
        "the last one, which waits for a node"
    )


def test_a_preempted_task_leaves_once_its_status_says_how_far_it_came(make: Any) -> None:
    world = World(make, replicas={"max": 2, "tasksPerReplica": 4})
    tasks = tasks_of(make, 7, at=TOY)
    world.make_pipelines(world.decide(*tasks))
    world.up(TOY, SECOND)
    report = make.report(make.reported("Preempted", "t06", step=9), sequence=7)
    world.contacts[TOY] = replace(world.contacts[TOY], report=report)
    for run, at in (("run-1", TOY), (None, SECOND)):
        tasks[6] = make.task("t06", age=1, status={"pipeline": str(TOY), "step": 7, "run": run})
        assert where(world.decide(*tasks))["t06"] == str(at), run


def test_a_member_lets_in_whom_its_status_names(make: Any) -> None:
    """An operator that starts anew knows where a task may train from its status alone."""
    world = World(make, replicas={"max": 2, "tasksPerReplica": 1})
    tasks = tasks_of(make, 2)
    world.make_pipelines(world.decide(*tasks))
    world.up(TOY, SECOND)
    prepared = {
        key: make.report(make.reported("Prepared", name), sequence=7)
        for key, name in ((TOY, "t00"), (SECOND, "t01"))
    }
    for key, report in prepared.items():
        world.contacts[key] = replace(world.contacts[key], report=report)
    plans = world.decide(*tasks).plans
    assert not any(task.admitted for plan in plans.values() for task in plan.tasks)
    plans = world.decide(*moved(make, tasks, world.decide(*tasks))).plans
    assert [task.admitted for plan in plans.values() for task in plan.tasks] == [True, True]


def test_nobody_stands_idle_while_a_task_waits_for_workers_to_start(make: Any) -> None:
    world = World(make, replicas={"min": 2, "max": 2, "tasksPerReplica": 4})
    world.make_pipelines(world.decide())
    assert set(world.raw) == {TOY, SECOND}
    world.up(TOY)
    (task,) = tasks_of(make, 1, at=SECOND)
    assert where(world.decide(task)) == {"t00": str(TOY)}


def test_a_member_that_is_given_up_gets_no_tasks(make: Any) -> None:
    world = World(make)
    tasks = tasks_of(make, 9)
    world.make_pipelines(world.decide(*tasks))
    world.raw[SECOND]["status"] = {"givenUp": "RestartLimit"}
    world.up(TOY, THIRD)
    assert set(where(world.decide(*tasks)).values()) == {str(TOY), str(THIRD)}


def test_a_replica_goes_once_it_is_not_wanted_and_its_workers_are_gone(make: Any) -> None:
    world = World(make)
    tasks = tasks_of(make, 9)
    world.make_pipelines(world.decide(*tasks))
    world.up(TOY, SECOND, THIRD)
    few = moved(make, tasks, world.decide(*tasks))[:3]
    now = world.decide(*few)
    assert set(where(now).values()) == {str(TOY)}, "they come back to the first"
    assert now.delete_pipelines == ()
    world.groups[SECOND] = make.group(replicas=0)
    world.groups[THIRD] = WorkerGroup(0, "new", pods=make.group().pods)  # its pods are still ending
    assert [one.key for one in world.decide(*few).delete_pipelines] == [SECOND]
    del world.groups[THIRD]
    assert [one.key for one in world.decide(*few).delete_pipelines] == [SECOND, THIRD]


@pytest.mark.parametrize(
    "files", [False, True], ids=["its files are in a store", "its files are there alone"]
)
def test_a_suspended_task_keeps_no_replica_that_is_not_wanted(make: Any, files: bool) -> None:
    world = World(make, **({"checkpoints": {"uri": "file:///checkpoints"}} if files else {}))
    tasks = tasks_of(make, 9)
    world.make_pipelines(world.decide(*tasks))
    world.up(TOY)
    world.groups[SECOND] = make.group(replicas=0)
    waits = make.task("t00", age=100, suspend=True, status={"pipeline": str(SECOND), "step": 3})
    now = world.decide(waits)
    assert where(now) == {"t00": str(SECOND if files else TOY)}
    assert (SECOND in [one.key for one in now.delete_pipelines]) is not files


def test_a_replica_with_a_task_in_training_is_not_deleted(make: Any) -> None:
    world = World(make)
    tasks = tasks_of(make, 9)
    world.make_pipelines(world.decide(*tasks))
    world.up(TOY)
    world.up(SECOND, trains=["t00"])
    task = make.task("t00", age=100, status={"pipeline": str(SECOND)})
    now = world.decide(task)
    assert where(now) == {"t00": str(SECOND)}
    assert SECOND not in [one.key for one in now.delete_pipelines]


def test_a_user_never_meets_a_replica_as_a_pipeline_of_its_own(make: Any) -> None:
    """The oldest pipeline serves a task; a replica that were taken for one could be older."""
    world = World(make)
    tasks = tasks_of(make, 9)
    world.make_pipelines(world.decide(*tasks))
    world.raw[SECOND]["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"
    (task,) = tasks_of(make, 1)
    assert where(world.decide(task)) == {"t00": str(TOY)}
    del world.raw[TOY]
    assert where(world.decide(task)) == {"t00": None}, "whose owner is gone goes, too"


def test_statuses_say_how_many_members_there_are(make: Any) -> None:
    world = World(make)
    tasks = tasks_of(make, 9)
    assert world.decide(*tasks).pipeline_statuses[TOY].members == 1
    world.make_pipelines(world.decide(*tasks))
    statuses = world.decide(*tasks).pipeline_statuses
    assert (statuses[TOY].members, statuses[SECOND].members) == (3, None)
    plain = World(make, replicas={"max": 1})
    assert plain.decide().pipeline_statuses[TOY].members is None


def test_a_waiting_limit_is_of_all_members_together(make: Any) -> None:
    world = World(make, namespaceLimits={"waiting": 6})
    tasks = tasks_of(make, 9)
    world.make_pipelines(world.decide(*tasks))
    world.up(TOY, SECOND, THIRD)
    found = where(world.decide(*tasks))
    assert sum(at is not None for at in found.values()) == 6


@given(st.text("abc-.", min_size=1, max_size=300), st.integers(1, 63))
def test_names_of_replicas_fit_and_differ(name: str, number: int) -> None:
    assert len(replica_name(name, number)) <= NAME_LIMIT
    assert replica_name(name, number) != replica_name(name, number + 1)
    assert replica_name("x" * 250, number) != replica_name("x" * 251, number)
