"""When statuses are written: who has heard nothing goes first, and what waits is not forgotten."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from mlora_operator.api.meta import Condition
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.cluster.assumed import up_to_date_task
from mlora_operator.reconcile.cluster.throttle import API_SERVER
from mlora_operator.reconcile.cluster.writer import Writer
from mlora_operator.reconcile.ports import WriteRefused
from mlora_operator.reconcile.state.decision import Decision, Manifest
from mlora_operator.reconcile.state.snapshot import Contact, Key, Snapshot, Task
from mlora_worker.protocol import Plan, Report, StorageAccess, TaskPlan


class Paper:
    """Notes what is written to whom; in the place of a cluster and of coordinators."""

    def __init__(self) -> None:
        self.written: list[tuple[str, Manifest]] = []
        self.plans: list[int] = []  # generations
        self.understands = True

    async def patch_task_status(self, task: Task, patch: Manifest) -> None:
        self.written.append((task.key.name, patch))

    async def send_plan(self, _: Key, plan: Plan, _read: Any) -> None:
        self.plans.append(plan.generation)
        if not self.understands:
            raise WriteRefused("tasks.0.newest: Extra inputs are not permitted")


def waits(reason: str) -> TaskStatus:
    held = Condition(type="Admitted", status="False", reason=reason, last_transition_time="")
    return TaskStatus(state="Queued", reason=reason, conditions=(held,), observed_generation=1)


class Days:
    """One writer; each pass sees what the one before wrote."""

    def __init__(self, make: Any, *tasks: Task) -> None:
        self.now = make.now
        self.paper = Paper()
        self.writer = Writer(
            self.paper,  # type: ignore[arg-type]
            self.paper,  # type: ignore[arg-type]
            pace=API_SERVER,
        )
        self._tasks = tasks

    async def act(self, seconds: float, **statuses: TaskStatus) -> list[str]:
        """To whom was written, when so many seconds have gone by and the statuses shall be these."""
        self.now += timedelta(seconds=seconds)
        self.paper.written.clear()
        tasks = tuple(up_to_date_task(task, self.writer.tasks) for task in self._tasks)
        wishes = {task.key: statuses[task.key.name] for task in tasks if task.key.name in statuses}
        assert await self.writer.act(Snapshot(tasks=tasks), Decision(task_statuses=wishes), self.now)
        return [name for name, _ in self.paper.written]

    async def send(self, seconds: float, plan: Plan, run: str = "run-1") -> list[int]:
        """What was sent, when so many seconds have gone by and this plan is due."""
        self.now += timedelta(seconds=seconds)
        self.paper.plans.clear()
        key = Key("team-a", "toy")
        contact = Contact(report=Report(run_id=run, sequence=1, plan_generation=0, ready=True))
        done = await self.writer.act(Snapshot(contacts={key: contact}), Decision(plans={key: plan}), self.now)
        assert done or not self.paper.understands
        return self.paper.plans


async def test_what_waits_is_due_at_a_known_time_and_is_written_then(make: Any) -> None:
    days = Days(make, make.task("a"))
    assert await days.act(0, a=waits("PreparingData")) == ["a"]
    assert await days.act(0.5, a=waits("WaitingForMemory")) == []
    assert days.writer.held_back == timedelta(seconds=1.5)
    assert await days.act(1.5, a=waits("WaitingForMemory")) == ["a"]
    assert days.writer.held_back is None
    assert await days.act(99, a=waits("WaitingForMemory")) == []


async def test_what_is_overtaken_while_it_waits_is_never_written(make: Any) -> None:
    days = Days(make, make.task("a"))
    await days.act(0, a=waits("PreparingData"))
    await days.act(0.5, a=waits("WaitingForMemory"))
    assert await days.act(0.5, a=waits("PreparingData")) == []
    assert days.writer.held_back is None


async def test_who_has_heard_nothing_yet_goes_first(make: Any) -> None:
    days = Days(make, make.task("old"), make.task("older"), make.task("new"))
    await days.act(0, old=waits("PreparingData"), older=waits("PreparingData"))
    later = waits("WaitingForMemory")
    assert (await days.act(9, old=later, older=later, new=later))[0] == "new"


async def test_a_crowd_in_one_namespace_keeps_nobody_waiting_in_another(make: Any) -> None:
    crowd = [make.task(f"x{number:03}", "team-x") for number in range(100)]
    days = Days(make, *crowd, make.task("first"), make.task("second"))
    named = {
        task.key.name: waits("PreparingData") for task in (*crowd, make.task("first"), make.task("second"))
    }
    written = await days.act(0, **named)
    assert written[:4] == ["x000", "first", "x001", "second"]
    moved = await days.act(9, **dict.fromkeys(named, waits("WaitingForMemory")))
    assert moved.index("second") <= 3


async def test_a_clock_that_was_set_back_holds_nothing_up(make: Any) -> None:
    days = Days(make, make.task("a"))
    await days.act(0, a=waits("PreparingData"))
    assert await days.act(-3600, a=waits("WaitingForMemory")) == ["a"]


async def test_nonsense_in_one_status_keeps_nobody_else_from_getting_theirs(make: Any) -> None:
    days = Days(make, make.task("a", status={"startTime": "yesterday"}), make.task("b"))
    wish = waits("PreparingData").model_copy(update={"start_time": "yesterday"})
    assert set(await days.act(0, a=wish, b=waits("PreparingData"))) == {"a", "b"}


async def test_where_a_task_is_is_written_at_once(make: Any) -> None:
    days = Days(make, make.task("a"))
    await days.act(0, a=waits("PreparingData"))
    moved = waits("PreparingData").model_copy(update={"pipeline": "team-a/other"})
    assert await days.act(0.1, a=moved) == ["a"]


def plan_of(make: Any, tasks: int, generation: int) -> Plan:
    spec = make.task().spec
    one = TaskPlan(
        uid="uid",
        namespace="team-a",
        name="t",
        generation=1,
        admitted=False,
        base_model=make.model,
        lora=spec.lora,
        dataset=spec.dataset.for_plan(),
        training=spec.training.for_model(None),
        output_uri="s3://adapters/t",
        storage=StorageAccess(),
    )
    return Plan(
        generation=generation,
        tasks=tuple(one.model_copy(update={"uid": f"uid-{number}"}) for number in range(tasks)),
    )


async def test_a_long_plan_is_not_followed_by_the_next_at_once(make: Any) -> None:
    days = Days(make)
    assert await days.send(0, plan_of(make, 400, 1)) == [1]
    assert await days.send(0.3, plan_of(make, 400, 2)) == []
    assert days.writer.held_back == timedelta(seconds=0.1)
    assert await days.send(0.1, plan_of(make, 400, 3)) == [3]
    assert await days.send(0.1, plan_of(make, 2, 4)) == [4], "a short one need not wait for long"
    assert await days.send(-60, plan_of(make, 2, 5)) == [5], "a clock that was set back holds nothing up"


async def test_what_was_told_a_moment_ago_is_known_for_as_long_as_its_words_stay(make: Any) -> None:
    days = Days(make, make.task("a"))
    await days.act(0, a=waits("WaitingForMemory"))
    told = [days.writer.recently_written(days.now + timedelta(seconds=later)) for later in (0, 59, 60, -1)]
    assert told == [{"uid-team-a-a"}, {"uid-team-a-a"}, set(), set()]


async def test_a_plan_that_workers_do_not_understand_is_not_sent_with_every_pass(make: Any) -> None:
    days = Days(make)
    days.paper.understands = False
    assert await days.send(0, plan_of(make, 2, 1)) == [1]
    assert await days.send(0.5, plan_of(make, 2, 1)) == []
    assert days.writer.held_back == timedelta(seconds=29.5)
    assert await days.send(29.5, plan_of(make, 2, 1)) == [1]
    assert await days.send(0.5, plan_of(make, 3, 2)) == [2], "other tasks may be understood"
    days.paper.understands = True
    assert await days.send(0.5, plan_of(make, 3, 2), run="run-2") == [2], "other workers may understand it"
