"""What passes see of writes that are still under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from mlora_operator.api import conditions as c
from mlora_operator.api.meta import Condition
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.cluster.assumed import up_to_date_task
from mlora_operator.reconcile.cluster.writer import AT_ONCE, PATIENT_AT_ONCE, Writer
from mlora_operator.reconcile.ports import WriteRefused
from mlora_operator.reconcile.state.decision import Decision, DesiredWorkers, Event, Manifest
from mlora_operator.reconcile.state.snapshot import Key, Snapshot, Task
from mlora_worker.protocol import Plan

TOLD = "what is there was told"


class SlowWorld:
    """Each write begins at once and ends when a test says how."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.told: list[str] = []
        self.refuses: str | None = None
        self._ends: dict[str, asyncio.Future[None]] = {}

    async def patch_task_status(self, task: Task, _patch: Manifest) -> None:
        await self._write(task.key.name)

    async def apply_workers(self, workers: DesiredWorkers) -> None:
        self.begun.append(f"{workers.replicas} workers of {workers.pipeline.key.name}")
        if self.refuses is not None:
            raise WriteRefused(self.refuses)

    async def send_plan(self, pipeline: Key, _plan: Plan, _read: Any) -> None:
        await self._write(f"plan of {pipeline.name}")

    async def emit_event(self, event: Event) -> None:
        self.told.append(event.message)

    async def _write(self, about: str) -> None:
        self.begun.append(about)
        self._ends[about] = asyncio.get_running_loop().create_future()
        await self._ends[about]

    async def end(self, about: str, error: Exception | None = None) -> None:
        if error is None:
            self._ends.pop(about).set_result(None)
        else:
            self._ends.pop(about).set_exception(error)
        await turn()


async def turn() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


class Passes:
    """One writer; each pass wishes the same statuses for tasks as they are seen."""

    def __init__(self, make: Any, world: SlowWorld) -> None:
        self.asked: list[bool] = []
        self._now = make.now
        self._make = make
        self.writer = Writer(world, world, look_again=self.asked.append)  # type: ignore[arg-type]

    def seen(self, task: Task) -> Task:
        return up_to_date_task(task, self.writer.tasks)

    async def wish(self, **wishes: TaskStatus) -> None:
        tasks = tuple(self.seen(self._make.task(name)) for name in wishes)
        statuses = {task.key: wishes[task.key.name] for task in tasks}
        story = tuple(
            Event("LoRATask", task.key, task.uid, "Normal", "Rejected", TOLD)
            for task in tasks
            if task.status != statuses[task.key]
        )
        decision = Decision(task_statuses=statuses, events=story)
        self.writer.begin(Snapshot(tasks=tasks), decision, self._now)
        await turn()


@pytest.fixture
async def world() -> SlowWorld:
    return SlowWorld()


@pytest.fixture
async def passes(make: Any, world: SlowWorld) -> AsyncIterator[Passes]:
    made = Passes(make, world)
    yield made
    await made.writer.close()


def status(type_: str, reason: str) -> TaskStatus:
    held = Condition(type=type_, status="True", reason=reason, last_transition_time="2026-03-01T12:00:00Z")
    return TaskStatus(state="Some", reason=reason, conditions=(held,), observed_generation=1)


async def test_a_status_that_is_being_written_is_not_written_or_told_twice(
    make: Any, world: SlowWorld, passes: Passes
) -> None:
    wish = status(c.ACCEPTED, "Accepted")
    await passes.wish(a=wish)
    assert passes.seen(make.task("a")).status == wish
    await passes.wish(a=wish)
    await world.end("a")
    assert (world.begun, world.told, passes.asked) == (["a"], [TOLD], [])


async def test_what_failed_is_wished_and_told_again(make: Any, world: SlowWorld, passes: Passes) -> None:
    wish = status(c.ACCEPTED, "Accepted")
    await passes.wish(a=wish)
    await world.end("a", OSError("the API server is away"))
    assert passes.asked == [True], "another pass, soon"
    assert passes.seen(make.task("a")).status == TaskStatus()
    await passes.wish(a=wish)
    assert (world.begun, world.told) == (["a", "a"], [])
    await world.end("a")
    assert world.told == [TOLD]


@pytest.mark.parametrize("type_", [c.SUCCEEDED, c.FAILED])
async def test_the_end_of_a_task_counts_only_once_the_api_server_has_it(
    make: Any, world: SlowWorld, passes: Passes, type_: str
) -> None:
    """Else a pass would let the coordinator forget a task of which nobody knows yet that it has ended."""
    wish = status(type_, "Ended")
    await passes.wish(a=wish)
    assert not passes.seen(make.task("a")).finished
    await passes.wish(a=wish)
    assert world.begun == ["a"], "once is enough"
    await world.end("a")
    assert passes.seen(make.task("a")).finished


async def test_who_has_just_come_does_not_wait_for_a_crowd_that_moves(
    world: SlowWorld, passes: Passes
) -> None:
    crowd = [f"old-{number:02}" for number in range(2 * AT_ONCE)]
    await passes.wish(**dict.fromkeys(crowd, status(c.ACCEPTED, "Accepted")))
    for name in crowd:
        await world.end(name)
    world.begun.clear()
    moved = dict.fromkeys(crowd, status(c.ADMITTED, "Admitted"))
    await passes.wish(**moved)
    assert world.begun == crowd[:PATIENT_AT_ONCE], "as many as are let"
    await passes.wish(**moved, new=status(c.ACCEPTED, "Accepted"))
    assert world.begun[PATIENT_AT_ONCE:] == ["new"]
    await world.end(crowd[0])
    assert world.begun[PATIENT_AT_ONCE + 1 :] == [crowd[PATIENT_AT_ONCE]]


async def test_a_coordinator_that_takes_no_plan_keeps_no_status_waiting(
    make: Any, world: SlowWorld, passes: Passes
) -> None:
    task = make.task("a")
    wish = status(c.ACCEPTED, "Accepted")
    decision = Decision(
        plans={Key("ml", f"pipeline-{number}"): Plan(generation=1) for number in range(AT_ONCE)},
        task_statuses={task.key: wish},
    )
    passes.writer.begin(Snapshot(tasks=(task,)), decision, make.now)
    await turn()
    assert world.begun[-1] == "a"


async def test_refused_workers_are_asked_for_now_and_then_and_at_once_when_the_spec_changes(
    make: Any, world: SlowWorld, passes: Passes
) -> None:
    pipeline = make.pipeline("toy")

    async def ask(seconds: float, generation: int) -> bool:
        world.begun.clear()
        wish = DesiredWorkers(replace(pipeline, generation=generation), 2)
        decision = Decision(workers={pipeline.key: wish})
        await passes.writer.act(Snapshot(), decision, make.now + timedelta(seconds=seconds))
        return world.begun == ["2 workers of toy"]

    world.refuses = '422: spec.limits: "one" is no quantity'
    assert await ask(0, 1)
    assert passes.writer.refused == {pipeline.uid: world.refuses}
    assert not await ask(1, 1)
    assert await ask(2, 2), "somebody has changed it"
    assert not await ask(3, 2)
    assert await ask(40, 2), "a quota may have been raised"
    world.refuses = None
    assert await ask(41, 3)
    assert passes.writer.refused == {}
    assert await ask(42, 3)
