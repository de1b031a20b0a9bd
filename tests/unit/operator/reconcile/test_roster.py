"""What is remembered from one decision to the next changes no decision."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from mlora_operator.reconcile.places import memory_model, places
from mlora_operator.reconcile.roster import fresh_roster, roster
from mlora_operator.reconcile.snapshot import Contact, Task
from mlora_operator.reconcile.view import View, view
from mlora_operator.scheduling.admission import Place
from mlora_operator.scheduling.room import AskedAnew
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

    def happen(self) -> None:
        rng, task = self.rng, self.rng.choice(self.tasks)
        match rng.choice(["steps", "steps", "steps", "report", "counts", "come", "go", "suspend", "forget"]):
            case "steps":
                for uid, one in self.reports.items():
                    if one.phase is TaskPhase.TRAINING:
                        self.reports[uid] = one.model_copy(update={"step": one.step + 1})
            case "report":
                self.report(task.uid)
            case "counts" if task.uid in self.reports:
                counted = {
                    "total_steps": rng.choice([10, 20]),
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

    def view(self) -> View:
        report = self.make.report(*self.reports.values(), capacity=2**28)
        snapshot = self.make.snapshot(*self.tasks, contact=Contact(report=report), group=self.make.group())
        return view(self.make.pipeline(), tuple(self.tasks), snapshot)


@pytest.mark.parametrize("seed", range(6))
def test_a_roster_is_what_it_would_be_if_it_were_read_anew(make: Any, seed: int) -> None:
    world = World(make, seed)
    for _ in range(40):
        now = world.view()
        assert roster(now) == fresh_roster(now)
        world.happen()


@pytest.mark.parametrize("seed", range(3))
def test_a_decision_is_that_of_the_plain_memory_model(make: Any, seed: int) -> None:
    """Whole sets judged anew, nothing remembered, against sums and what was remembered."""
    world = World(make, seed)
    for _ in range(25):
        now = world.view()
        model = memory_model(now)
        assert model is not None

        def plainly(entrants: Any, _: Any, *rest: Any, verdict: Any = model.verdict) -> Mapping[str, Place]:
            return schedule(entrants, AskedAnew(verdict), *rest)

        assert told(places(now, make.now)) == told(places(now, make.now, plainly))
        world.happen()


def told(found: Mapping[str, Place]) -> Mapping[str, tuple[object, ...]]:
    return {
        uid: (one.outcome, one.verdict, one.behind, one.after, one.displaced_by) for uid, one in found.items()
    }
