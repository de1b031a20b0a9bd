"""What is remembered from one decision to the next changes no decision."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from mlora_operator.reconcile.admission.admit import AdmissionMemo, admissions, fresh_admissions
from mlora_operator.reconcile.admission.capacity import memory_model
from mlora_operator.reconcile.admission.pipeline_view import PipelineView, view
from mlora_operator.reconcile.admission.queue import Queues, fresh_queue, queue_of
from mlora_operator.reconcile.state.snapshot import Contact, Task
from mlora_operator.scheduling.admission import Admission
from mlora_operator.scheduling.memory import WholeSetMemory
from mlora_operator.scheduling.schedule import schedule
from mlora_worker.protocol import DataCounts, TaskPhase, TaskReport

ROWS = DataCounts(rows=100, used=100, tokens=20_000)
PHASES = (TaskPhase.PREPARING, TaskPhase.PREPARED, TaskPhase.TRAINING, TaskPhase.PREEMPTED, TaskPhase.SAVING)


class World:
    """A pipeline with tasks to which one thing after the other happens."""

    def __init__(self, make: Any, seed: int) -> None:
        self.make, self.rng, self.made = make, random.Random(seed), 0
        self.tasks: list[Task] = []
        self.reports: dict[str, TaskReport] = {}
        for _ in range(6):
            self.come()

    def come(self) -> None:
        self.made += 1
        modules = self.rng.choice([["q_proj"], ["q_proj", "v_proj"], ["no_such_module"]])
        task = self.make.task(
            f"t{self.made}",
            priority=self.rng.choice([0, 1, 5]),
            lora={"rank": self.rng.choice([4, 16]), "targetModules": modules},
            training={"batchSize": self.rng.choice([2, 8, 16])},
        )
        self.tasks.append(task)
        self.report(task.uid)

    def report(self, uid: str) -> None:
        phase, step = self.rng.choice(PHASES), self.rng.randint(0, 9)
        self.reports[uid] = TaskReport(uid=uid, phase=phase, step=step, total_steps=10, data=ROWS)

    def train(self) -> None:
        for uid, one in self.reports.items():
            if one.phase is TaskPhase.TRAINING and one.step < one.total_steps:
                self.reports[uid] = one.model_copy(update={"step": one.step + 1})

    def happen(self) -> None:
        rng, task = self.rng, self.rng.choice(self.tasks)
        match rng.choice(["steps", "steps", "steps", "report", "counts", "come", "go", "suspend", "forget"]):
            case "steps":
                self.train()
            case "report":
                self.report(task.uid)
            case "counts" if task.uid in self.reports:
                counted = {
                    "total_steps": rng.choice([10, 20] if self.reports[task.uid].step <= 10 else [20]),
                    "data": ROWS.model_copy(update={"tokens": rng.choice([20_000, 40_000])}),
                }
                self.reports[task.uid] = self.reports[task.uid].model_copy(update=counted)
            case "come":
                self.come()
            case "go" if len(self.tasks) > 3:
                self.tasks.remove(task)
            case "suspend":
                at, version = self.tasks.index(task), str(self.rng.random())
                self.tasks[at] = self.make.task(task.key.name, suspend=True, resourceVersion=version)
            case "forget":
                self.reports.pop(task.uid, None)

    def view(self) -> PipelineView:
        report = self.make.report(*self.reports.values(), capacity=2**28)
        snapshot = self.make.snapshot(*self.tasks, contact=Contact(report=report), group=self.make.group())
        return view(self.make.pipeline(), tuple(self.tasks), snapshot)


@pytest.mark.parametrize("seed", range(6))
def test_a_roster_is_what_it_would_be_if_it_were_read_anew(make: Any, seed: int) -> None:
    world, queues = World(make, seed), Queues()
    for _ in range(40):
        now = world.view()
        queues.turn()
        known, fresh = queue_of(now, queues), fresh_queue(now)
        assert known.entrants == fresh.entrants
        assert replace(known, as_read=(), steps={}) == replace(fresh, as_read=())
        world.happen()


def test_an_era_lasts_while_those_inside_step_on(make: Any) -> None:
    """Who goes back some steps has more rounds left than before, and others may pass."""
    world = World(make, 0)
    world.tasks = [make.task("a"), make.task("b")]
    eras, queues = [], Queues()
    for steps in ((3, 0), (4, 0), (2, 0), (2, 1)):
        told = zip(world.tasks, (TaskPhase.TRAINING, TaskPhase.PREPARED), steps, strict=True)
        world.reports = {
            task.uid: TaskReport(uid=task.uid, phase=phase, step=step, total_steps=10, data=ROWS)
            for task, phase, step in told
        }
        queues.turn()
        eras.append(queue_of(world.view(), queues).era)
    assert [one is other for one, other in pairwise(eras)] == [True, False, False]


@pytest.mark.parametrize("seed", range(3))
def test_a_decision_is_that_of_the_plain_memory_model(make: Any, seed: int) -> None:
    """Whole sets judged anew, nothing remembered, against sums and what was remembered."""
    world, known = World(make, seed), AdmissionMemo()
    for _ in range(25):
        now = world.view()
        model = memory_model(now)
        assert model is not None

        def plainly(entrants: Any, _: Any, *rest: Any, check: Any = model.check) -> Mapping[str, Admission]:
            return schedule(entrants, WholeSetMemory(check), *rest)

        known.turn()
        assert told(admissions(now, make.now, known)) == told(fresh_admissions(now, make.now, plainly))
        world.happen()


@pytest.mark.parametrize("seed", range(4))
def test_places_that_are_kept_are_those_that_would_be_found_anew(make: Any, seed: int) -> None:
    """While time passes, so that some have waited for long, and the pipeline is changed now and then."""
    world, now, kept = World(make, seed), make.now, 0
    before: Mapping[str, Admission] = {}
    known = AdmissionMemo()
    for _ in range(60):
        seen = world.view()
        known.turn()
        found = admissions(seen, now, known)
        assert told(found) == told(fresh_admissions(seen, now))
        kept += found is before
        before = found
        if world.rng.random() < 0.6:
            world.train()
        else:
            world.happen()
        now += timedelta(seconds=world.rng.choice([0, 5, 60, 400]))
    assert kept


def test_places_are_found_anew_once_one_may_be_passed_no_more(make: Any) -> None:
    """The clock alone does it: nothing has been said since."""
    world = World(make, 0)
    big = {"batchSize": 16, "maxSeqLength": 512}  # two of them do not fit
    world.tasks = [make.task("a", training=big), make.task("b", training=big), make.task("c", training=big)]
    world.reports = {
        task.uid: TaskReport(uid=task.uid, phase=phase, step=1, total_steps=10, data=ROWS)
        for task, phase in zip(world.tasks, (TaskPhase.TRAINING, *[TaskPhase.PREPARED] * 2), strict=True)
    }
    seen = world.view()
    passed = make.now + timedelta(minutes=10) - timedelta(seconds=60)  # they are a minute old
    second = timedelta(seconds=1)
    found, known = [], AdmissionMemo()
    for at in (make.now, passed - second, passed, passed + second):
        known.turn()
        found.append(admissions(seen, at, known))
    assert found[0] is found[1]
    assert found[1] is not found[2]
    assert found[2] is found[3]
    assert [found[number][world.tasks[2].uid].behind is not None for number in (1, 2)] == [False, True]


def told(found: Mapping[str, Admission]) -> Mapping[str, tuple[object, ...]]:
    return {
        uid: (one.outcome, one.check, one.behind, one.after, one.displaced_by) for uid, one in found.items()
    }
