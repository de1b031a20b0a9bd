"""A task's whole life: the real loop against a cluster in memory and a coordinator that behaves like the real one."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from mlora_operator.coordinator.progress import by_another_clock
from mlora_operator.reconcile.loop import Loop
from mlora_operator.reconcile.ports import ClusterObjects, Endpoint, Gone
from mlora_operator.reconcile.state.decision import DesiredWorkers, Event
from mlora_operator.reconcile.state.snapshot import Contact, Key, Pipeline, Pod, SecretData, Task, WorkerGroup
from mlora_worker.coordinator.preparation.texts import PlanTexts
from mlora_worker.protocol import Plan, Report, TaskPhase, TaskReport

TOY = Key("team-a", "toy")
ON_THE_WAY = [
    TaskPhase.PREPARING,
    TaskPhase.PREPARED,
    TaskPhase.TRAINING,
    TaskPhase.SAVING,
    TaskPhase.SUCCEEDED,
]


@dataclass
class Clock:
    now: datetime
    wrong: timedelta = timedelta()  # what people read is so much ahead

    def __call__(self) -> datetime:
        return self.now + self.wrong

    def monotonic(self) -> float:
        return self.now.timestamp()


@dataclass
class Coordinator:
    """Takes plans as the protocol says, and moves each task on by one phase when it may."""

    make: Any
    run: str
    generation: int = 0
    sequence: int = 0
    tasks: dict[str, TaskReport] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    texts: PlanTexts = field(default_factory=PlanTexts)
    received: list[tuple[str | None, str | None]] = field(default_factory=list)  # rows and template

    def put(self, plan: Plan) -> None:
        if plan.generation < self.generation:
            raise RuntimeError("an older plan")
        self.generation = plan.generation
        for task in plan.tasks:
            if task.digests and (task.uid not in self.tasks or self.texts.waits(task.uid)):
                self.texts.wait(task)
        self.tasks = {
            task.uid: self.tasks.get(task.uid, TaskReport(uid=task.uid, phase=TaskPhase.PREPARING))
            for task in plan.tasks
        }
        self.admitted = {task.uid for task in plan.tasks if task.admitted}

    def take(self, digest: str, text: str) -> None:
        self.texts.take(digest, text)
        self.received += [(plan.dataset_text, plan.template_text) for plan in self.texts.complete()]

    def advance(self) -> None:
        self.sequence += 1
        for uid, task in self.tasks.items():
            if self.texts.waits(uid):
                continue
            if task.phase in (TaskPhase.SUCCEEDED, TaskPhase.FAILED):
                continue
            if task.phase is TaskPhase.PREPARED and uid not in self.admitted:
                continue
            following = ON_THE_WAY[ON_THE_WAY.index(task.phase) + 1]
            if following is TaskPhase.TRAINING:
                self.trained.append(uid)
            name = uid.rsplit("-", 1)[1]
            self.tasks[uid] = self.make.reported(following.value, name, step=5)

    def report(self) -> Report:
        found: Report = self.make.report(
            *self.tasks.values(),
            run=self.run,
            sequence=self.sequence,
            generation=self.generation,
            lacks=self.texts.lacks,
        )
        return found


class World:
    """Cluster and coordinators in memory: both ports of the loop."""

    def __init__(self, make: Any, clock: Clock) -> None:
        self.make = make
        self.clock = clock
        self.raw_tasks: dict[Key, dict[str, Any]] = {}
        self.raw_pipelines: dict[Key, dict[str, Any]] = {}
        self.secrets: dict[Key, dict[str, str]] = {}
        self.config_maps: dict[Key, dict[str, str]] = {}
        self.groups: dict[Key, WorkerGroup] = {}
        self.coordinator: Coordinator | None = None
        self.contact = Contact()
        self.events: list[tuple[str, str]] = []
        self.writes: list[str] = []
        self.plans: list[Plan] = []
        self.runs = 0
        self.started = 0

    # --- the cluster ---

    def objects(self) -> ClusterObjects:
        return ClusterObjects(
            tasks=[deepcopy(raw) for raw in self.raw_tasks.values()],
            pipelines=[deepcopy(raw) for raw in self.raw_pipelines.values()],
            groups=dict(self.groups),
        )

    def revision(self, _pipeline: Pipeline) -> str:
        return "new"

    def coordinator_url(self, _pipeline: Pipeline, _scheme: str) -> str:
        return "http://coordinator"

    async def read_secret(self, key: Key) -> SecretData | None:
        return self.secrets.get(key)

    async def read_config_map(self, key: Key) -> dict[str, str] | None:
        return self.config_maps.get(key)

    async def read_token(self, _pipeline: Pipeline) -> str | None:
        return "token"

    async def read_namespace_labels(self, _namespace: str) -> Mapping[str, str]:
        return {}

    async def apply_pipeline(self, manifest: dict[str, Any]) -> None:
        key = Key(manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        if key not in self.raw_pipelines:
            self.raw_pipelines[key] = self.make.raw_pipeline(
                key.name, key.namespace, annotations=manifest["metadata"]["annotations"], **manifest["spec"]
            )

    async def delete_pipeline(self, pipeline: Pipeline) -> None:
        self.raw_pipelines.pop(pipeline.key)

    async def apply_workers(self, workers: DesiredWorkers) -> None:
        held = self.groups.get(workers.pipeline.key)
        if held is None or held.replicas != workers.replicas:
            self.started += workers.replicas > 0
            self.groups[workers.pipeline.key] = self.make.group(replicas=workers.replicas)
            self.start_workers() if workers.replicas else self.end_workers()

    async def delete_pod(self, _pod: Pod) -> None:
        raise AssertionError("no pod is stale here")

    async def delete_task(self, task: Task) -> None:
        self.raw_tasks.pop(task.key)

    async def patch_task_status(self, task: Task, patch: dict[str, Any]) -> None:
        self.write(self.raw_tasks, task.key, task.uid, patch)

    async def patch_pipeline_status(self, pipeline: Pipeline, patch: dict[str, Any]) -> None:
        self.write(self.raw_pipelines, pipeline.key, pipeline.uid, patch)

    async def emit_event(self, event: Event) -> None:
        self.events.append((event.about.name, event.reason))

    def write(self, shelf: dict[Key, dict[str, Any]], key: Key, uid: str, patch: dict[str, Any]) -> None:
        raw = shelf.get(key)
        if raw is None or raw["metadata"]["uid"] != uid:
            raise Gone(str(key))
        self.writes.append(f"{key.name} {sorted(patch)}")
        for name, value in patch.items():
            if value is None:
                raw["status"].pop(name, None)
            elif isinstance(value, dict) and isinstance(raw["status"].get(name), dict):
                raw["status"][name] |= value
            else:
                raw["status"][name] = value
        raw["metadata"]["resourceVersion"] = str(int(raw["metadata"]["resourceVersion"]) + 1)

    # --- the coordinators ---

    def follow(self, endpoints: Mapping[Key, Endpoint]) -> None:
        if not endpoints:
            self.contact = Contact()
        elif self.coordinator is not None:
            self.contact = replace(self.contact, report=self.coordinator.report(), lost_since=None)

    def contacts(self) -> Mapping[Key, Contact]:
        key = next(iter(self.groups), TOY)
        return {key: self.contact}

    async def send_text(self, _pipeline: Key, digest: str, text: str) -> None:
        assert self.coordinator is not None
        self.coordinator.take(digest, text)

    async def send_plan(self, _pipeline: Key, plan: Plan, _read: Any) -> None:
        assert self.coordinator is not None
        self.coordinator.put(plan)
        self.plans.append(plan)
        self.contact = replace(
            self.contact, sent=plan, sent_run=self.coordinator.run, sent_sequence=self.coordinator.sequence
        )

    def clock_jumped(self) -> None:
        self.contact = by_another_clock(self.contact, self.clock())

    # --- what happens by itself ---

    def start_workers(self) -> None:
        self.runs += 1
        trained = self.coordinator.trained if self.coordinator is not None else []
        self.coordinator = Coordinator(self.make, f"run-{self.runs}", trained=trained)

    def end_workers(self) -> None:
        self.coordinator = None

    def accepted(self, name: str = "t1") -> dict[str, Any]:
        """The condition of that name."""
        held = self.raw_tasks[Key("team-a", name)]["status"]["conditions"]
        return next(one for one in held if one["type"] == "Accepted")

    def state(self, name: str = "t1") -> str:
        return str(self.raw_tasks[Key("team-a", name)]["status"].get("state"))


class Stage:
    """Passes of the loop with the world moving on in between."""

    def __init__(self, make: Any, **settings: Any) -> None:
        self.make = make
        self.settings = make.settings(**settings)
        self.clock = Clock(make.now)
        self.world = World(make, self.clock)
        self.world.raw_pipelines[TOY] = make.raw_pipeline()
        self.new_operator()

    def new_operator(self) -> None:
        self.world.contact = Contact()
        self.loop = Loop(
            self.world, self.world, self.settings, now=self.clock, monotonic=self.clock.monotonic
        )

    def add(self, name: str = "t1", **fields: Any) -> None:
        self.world.raw_tasks[Key("team-a", name)] = self.make.raw_task(name, **fields)

    async def passes(self, count: int = 1) -> None:
        """Passes in a world that stands still but for the clock."""
        for _ in range(count):
            assert await self.loop.step()
            self.clock.now += timedelta(seconds=6)

    async def until(self, state: str, name: str = "t1") -> list[str]:
        """Passes until a task has this state, with all states on the way; the coordinator moves on after every third."""
        states = []
        for number in range(90):
            await self.passes()
            if self.world.state(name) not in states[-1:]:
                states.append(self.world.state(name))
            if states[-1] == state:
                return states
            if number % 3 == 2 and self.world.coordinator is not None:
                self.world.coordinator.advance()
        raise AssertionError(f"{name} never came to be {state}: {states}")


@pytest.fixture
def stage(make: Any) -> Stage:
    return Stage(make)


async def test_from_apply_to_adapter(stage: Stage) -> None:
    stage.add()
    states = await stage.until("Succeeded")
    assert states == ["Pending", "Preparing", "Queued", "Training", "Saving", "Succeeded"]
    status = stage.world.raw_tasks[Key("team-a", "t1")]["status"]
    assert status["adapter"]["uri"] == "s3://adapters/t1"
    assert [reason for name, reason in stage.world.events if name == "t1"] == [
        "Accepted",
        "Admitted",
        "Training",
        "Saving",
        "AdapterUploaded",
    ]


async def test_a_world_at_rest_is_not_written_to(stage: Stage) -> None:
    stage.add()
    await stage.until("Succeeded")
    await stage.passes(2)
    stage.world.writes.clear()
    await stage.passes(5)
    assert stage.world.writes == []


async def test_workers_go_when_idle_and_come_back_for_the_next_task(stage: Stage) -> None:
    stage.add()
    await stage.until("Succeeded")
    await stage.passes()  # the clock of idleness starts
    stage.clock.now += timedelta(minutes=11)
    await stage.passes(2)
    assert stage.world.groups[TOY].replicas == 0
    stage.add("t2")
    await stage.until("Succeeded", "t2")
    assert stage.world.groups[TOY].replicas == 2
    assert (stage.world.state("t1"), stage.world.state("t2")) == ("Succeeded", "Succeeded")
    assert stage.world.started == 2


async def test_a_killed_group_runs_the_task_again_and_counts_it_once(stage: Stage) -> None:
    stage.add()
    await stage.until("Training")
    stage.world.start_workers()  # the group has started anew
    await stage.until("Succeeded")
    status = stage.world.raw_tasks[Key("team-a", "t1")]["status"]
    assert status["restarts"] == 1
    assert [reason for name, reason in stage.world.events if name == "t1"].count("Restarting") == 1


async def test_a_finished_task_is_never_trained_again_whoever_restarts(stage: Stage) -> None:
    stage.add()
    await stage.until("Succeeded")
    assert stage.world.coordinator is not None
    assert stage.world.coordinator.trained == ["uid-team-a-t1"]
    stage.new_operator()
    stage.world.start_workers()
    await stage.passes(10)
    assert stage.world.coordinator.trained == ["uid-team-a-t1"]


async def test_a_restarted_operator_goes_on_without_a_word(stage: Stage) -> None:
    stage.add()
    await stage.until("Training")
    stage.world.events.clear()
    stage.new_operator()
    await stage.passes(2)
    assert stage.world.state() == "Training"
    assert stage.world.events == []
    await stage.until("Succeeded")


async def test_tasks_join_and_leave_while_others_train(stage: Stage) -> None:
    stage.add("t1")
    await stage.until("Training")
    stage.add("t2", priority=5)
    await stage.until("Preparing", "t2")
    del stage.world.raw_tasks[Key("team-a", "t1")]
    await stage.until("Succeeded", "t2")
    await stage.passes(1)
    assert stage.world.coordinator is not None
    assert stage.world.coordinator.tasks == {}


async def test_a_task_deleted_in_the_middle_of_a_pass_stops_nothing(stage: Stage) -> None:
    stage.add("t1")
    stage.add("t2")
    await stage.passes(1)
    world = stage.world
    original = world.objects()
    del world.raw_tasks[Key("team-a", "t1")]
    world.objects = lambda: replace(original, groups=dict(world.groups))  # type: ignore[method-assign]
    assert await stage.loop.step()  # the index still shows it; the write finds it gone
    del world.__dict__["objects"]
    await stage.until("Succeeded", "t2")


async def test_an_index_that_lags_behind_the_writes_tells_nothing_twice(stage: Stage) -> None:
    stage.add()
    before = stage.world.objects()
    await stage.passes()
    stage.world.writes.clear()
    now = stage.world.objects
    stage.world.objects = lambda: before  # type: ignore[method-assign]
    await stage.passes()
    assert [reason for name, reason in stage.world.events if name == "t1"] == ["Accepted"]
    assert not [write for write in stage.world.writes if write.startswith("t1")]
    stage.world.objects = now  # type: ignore[method-assign]
    await stage.until("Succeeded")


async def test_a_late_secret_is_picked_up_by_itself(stage: Stage) -> None:
    stage.add(storage={"secretRef": {"name": "keys"}})
    await stage.until("Rejected")
    stage.world.secrets[Key("team-a", "keys")] = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    await stage.until("Succeeded")


async def test_rows_of_a_late_config_map_are_sent_as_they_were_when_it_was_read_first(stage: Stage) -> None:
    stage.add(dataset={"uri": None, "configMapRef": {"name": "rows", "key": "train.csv"}})
    await stage.until("Rejected")
    assert stage.world.accepted()["reason"] == "ConfigMapNotFound"
    stage.world.config_maps[Key("team-a", "rows")] = {"train.jsonl": "another key"}
    await stage.passes()
    assert "no text under the key train.csv" in stage.world.accepted()["message"]
    stage.world.config_maps[Key("team-a", "rows")] = {"train.csv": "prompt,completion\na,b\n"}
    await stage.until("Training")
    stage.world.config_maps[Key("team-a", "rows")] = {"train.csv": "changed"}
    await stage.until("Succeeded")
    assert stage.world.coordinator.received == [("prompt,completion\na,b\n", None)]
    assert {task.dataset_text for plan in stage.world.plans for task in plan.tasks} == {None}


async def test_a_chat_template_of_a_config_map_is_sent_as_it_was_read_first(stage: Stage) -> None:
    stage.add(dataset={"chatTemplateRef": {"name": "templates", "key": "bot"}})
    await stage.until("Rejected")
    assert stage.world.accepted()["message"].startswith(
        "spec.dataset.chatTemplateRef: no ConfigMap templates"
    )
    stage.world.config_maps[Key("team-a", "templates")] = {"bot": "{{ messages }}"}
    await stage.until("Training")
    stage.world.config_maps[Key("team-a", "templates")] = {"bot": "changed"}
    await stage.until("Succeeded")
    assert stage.world.coordinator.received == [(None, "{{ messages }}")]


async def test_a_model_of_the_catalogue_needs_no_pipeline(make: Any) -> None:
    stage = Stage(make, models=[{"name": make.model, "uri": "s3://models/toy", "stages": 2}])
    stage.world.raw_pipelines.clear()
    stage.add()
    await stage.until("Succeeded")
    assert [key.namespace for key in stage.world.raw_pipelines] == ["mlora-system"]


async def test_a_write_that_fails_is_tried_again_and_its_event_is_told_once(stage: Stage) -> None:
    stage.add()
    original = stage.world.patch_task_status

    async def refuse(_task: Task, _patch: dict[str, Any]) -> None:
        raise ConnectionError("the API server is away")

    stage.world.patch_task_status = refuse  # type: ignore[method-assign]
    assert not await stage.loop.step()
    stage.world.patch_task_status = original  # type: ignore[method-assign]
    assert await stage.loop.step()
    assert [reason for name, reason in stage.world.events if name == "t1"] == ["Accepted"]


@pytest.mark.parametrize("hours", [1, -1])
async def test_a_clock_that_jumps_makes_nobody_stand_still_nor_hides_who_does(
    stage: Stage, hours: int
) -> None:
    ended: list[str] = []

    async def end(_pod: Pod) -> None:
        ended.append(_pod.uid)

    stage.world.delete_pod = end  # type: ignore[method-assign]
    stage.add()
    await stage.until("Training")
    stage.world.contact = replace(stage.world.contact, still_since=stage.clock())
    stage.clock.wrong = timedelta(hours=hours)
    await stage.passes(3)
    assert ended == []
    stage.clock.now += timedelta(minutes=10)
    await stage.passes()
    assert ended == ["pod-0", "pod-1"]
