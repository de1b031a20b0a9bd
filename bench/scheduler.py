"""The scheduler: time of a decision, makespan over a bound, and a trace against other ways to share GPUs.

decision: one pass over 16 pipelines for which 1,000 tasks of mixed shapes wait, after something has changed, with the real
memory model: "whole" is from the objects and reports to who has a place on each of the 16, "schedule" the scheduler's part
of it. Between two decisions all tasks in training do a step, one ends and one comes; after every tenth the memory model of
a pipeline says something new. "first" is the very first one, with nothing remembered. Not in it: receiving and parsing
reports, fitting the memory model, plans and statuses.

makespan: small instances on one pipeline, simulated, over the bound of a mixed-integer program (bench/scheduling/bound.py):
the seeds from 0 on, none left out. Both sides count rounds as long as the worker's planner expects them; loading and saving
are left out on both sides. "best order": the shortest of many random orders in which the same tasks might have been let in.

trace: synthetic tasks of four tenants (bench/scheduling/trace.py) on simulated pipelines of four GPUs, each with its own
base model. "GPU for each": no pipeline, a job alone on one of the same GPUs, which must hold the whole model. Utilisation:
tokens trained over what the GPUs could train until the last task has ended.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from bench.options import parser, repetitions
from bench.report import last_line, table
from bench.scheduling.bound import least_makespan
from bench.scheduling.crowd import Crowd
from bench.scheduling.pace import Gpus, Together
from bench.scheduling.rivals import a_gpu_for_each, on_a_pipeline
from bench.scheduling.simulate import Life, SimMemory, SimPipeline, SimTask
from bench.scheduling.trace import BUDGET, small_instance, trace
from mlora_operator.reconcile.admission.admit import AdmissionMemo, admissions
from mlora_operator.reconcile.admission.pipeline_view import view
from mlora_operator.scheduling.admission import Admission, AdmissionOutcome
from mlora_operator.scheduling.entrant import Entrant
from mlora_operator.scheduling.priority import Priority
from mlora_operator.scheduling.schedule import schedule

WAITING, PIPELINES = 1000, 16
GOAL_MS, GOAL_MAKESPAN = 10.0, 1.05
GPUS = Gpus(count=4, rate=5_000)
LOAD = 0.85
WEIGHTS = {"research": 1.0, "search": 1.0, "support": 1.0, "legal": 1.0}
WAYS = {
    "priority": "ours, priority",
    "fairShare": "ours, fairShare",
    "shortestRemaining": "ours, shortestRemaining",
    "fifo": "pipeline, first come",
    "alone": "GPU for each job",
}


def main(arguments: list[str]) -> int:
    options = parser("scheduler", __doc__).parse_args(arguments)
    decisions = 20 if options.quick else 5000 if options.long else 500
    instances = 3 if options.quick else 100 if options.long else 20
    tasks, pipelines = (60, 1) if options.quick else (1000, 8) if options.long else (300, 4)
    orders = 10 if options.quick else 120
    repeat = repetitions(options, 1, 1)

    first, *times = decide_often(decisions)
    whole, alone = [one for one, _ in times], [one for _, one in times]
    print(f"decision with {WAITING} waiting tasks and {PIPELINES} pipelines, {decisions} times, in ms:")
    rows = [
        (name, _percentile(own, 50), _percentile(own, 99), max(own), begin)
        for name, own, begin in (("whole", whole, first[0]), ("schedule", alone, first[1]))
    ]
    print(table(("", "median", "p99", "most", "first"), rows))

    spans = [makespan(seed, orders) for seed in range(instances)]
    ours = [span.ours for span in spans]
    print(f"\nmakespan over the bound, {instances} instances:")
    times_over = [
        (name, statistics.mean(own), statistics.median(own), max(own))
        for name, own in (
            ("ours", ours),
            (f"best of {orders} orders", [span.best for span in spans]),
            ("ours over that", [span.ours / span.best for span in spans]),
        )
    ]
    print(table(("", "mean", "median", "most"), times_over))
    proven = sum(span.is_optimum for span in spans) / instances
    same = sum(span.is_same for span in spans) / instances
    print(f"bound met by a schedule of rounds: {proven:.0%}; every order takes as long: {same:.0%}")

    results = {way: replay(way, tasks, pipelines) for way in WAYS}
    print(f"\ntrace of {tasks * pipelines} tasks on {pipelines} pipelines of {GPUS.count} GPUs, in minutes:")
    head = ("", "wait mean", "p95", "p99", "urgent p95", "took mean", "p95", "p99", "used", "preempted")
    print(table(head, [(WAYS[way], *result.row()) for way, result in results.items()]))

    figures = {
        "decision_ms": _percentile(whole, 99),
        "decision_median_ms": _percentile(whole, 50),
        "decision_first_ms": first[0],
        "schedule_ms": _percentile(alone, 99),
        "schedule_median_ms": _percentile(alone, 50),
        "decision_goal_ms": GOAL_MS,
        "makespan": statistics.mean(ours),
        "makespan_most": max(ours),
        "makespan_best_order": statistics.mean(span.best for span in spans),
        "makespan_over_best_order": statistics.mean(span.ours / span.best for span in spans),
        "makespan_bound_met": proven,
        "makespan_same_in_every_order": same,
        "makespan_instances": instances,
        "makespan_goal": GOAL_MAKESPAN,
        "trace": {way: result.figures() for way, result in results.items()},
    }
    print(last_line("scheduler", figures, repetitions=repeat, threads=1, quick=options.quick))
    return 0


def decide_often(number: int) -> list[tuple[float, float]]:
    """Milliseconds of the first decision and of ``number`` later ones: the whole, and the scheduler's part."""
    crowd = Crowd(PIPELINES, WAITING, seed=1)
    living = crowd.live()
    times = []
    part, known = 0.0, AdmissionMemo()

    def timed(*asked: Any) -> Mapping[str, Admission]:
        nonlocal part
        begun = time.perf_counter()
        found = schedule(*asked)
        part += time.perf_counter() - begun
        return found

    for _ in range(number + 1):
        gc.collect()
        gc.disable()
        snapshot, now = crowd.snapshot(), crowd.now
        part = 0.0
        started = time.perf_counter()
        known.turn()
        found = [
            admissions(view(pipeline, tuple(tasks), snapshot), now, known, timed)
            for pipeline, tasks in zip(crowd.known, crowd.tasks, strict=True)
        ]
        times.append(((time.perf_counter() - started) * 1e3, part * 1e3))
        gc.enable()
        for at, result in enumerate(found):
            crowd.follow(
                at,
                {uid for uid, place in result.items() if place.outcome is AdmissionOutcome.ADMITTED},
                {uid for uid, place in result.items() if place.outcome is AdmissionOutcome.PREEMPTED},
            )
        next(living)
    return times


@dataclass(frozen=True, slots=True)
class Makespan:
    """Of one small instance, over the bound."""

    ours: float
    best: float  # of the orders that were tried, ours among them
    is_same: bool  # every order takes as long
    is_optimum: bool  # the bound is met by a schedule that may change tasks after every round


def makespan(seed: int, orders: int) -> Makespan:
    tasks = small_instance(seed)
    pace = Together(GPUS)
    bound, is_optimum = least_makespan(
        tasks, SimMemory({task.uid: task for task in tasks}, BUDGET), pace.round
    )
    ours = _time_of(tasks, pace) / bound
    rng = random.Random(seed)
    others = [
        _time_of(
            [replace(task, priority=rank) for rank, task in enumerate(rng.sample(tasks, len(tasks)))], pace
        )
        / bound
        for _ in range(orders)
    ]
    return Makespan(ours, min(ours, *others), max(others) - min(others) < 1e-9, is_optimum)


def _time_of(tasks: Sequence[SimTask], pace: Together) -> float:
    """Seconds until the last one has ended, under ``priority``."""

    def scheduler(entrants: Sequence[Entrant], memory: SimMemory, now: datetime) -> Mapping[str, Admission]:
        return schedule(entrants, memory, Priority(), now)

    return max(life.ended or 0.0 for life in SimPipeline(tasks, BUDGET, scheduler, pace).run().values())


@dataclass(frozen=True, slots=True)
class Replay:
    """One way over the whole trace. Times in minutes."""

    waited: list[float]
    urgent: list[float]  # waiting of the highest priority
    took: list[float]
    used: float
    preemptions: int

    def row(self) -> tuple[object, ...]:
        return (
            statistics.mean(self.waited), _percentile(self.waited, 95), _percentile(self.waited, 99),
            _percentile(self.urgent, 95), statistics.mean(self.took), _percentile(self.took, 95),
            _percentile(self.took, 99), self.used, self.preemptions,
        )  # fmt: skip

    def figures(self) -> Mapping[str, object]:
        names = (
            "wait_mean", "wait_p95", "wait_p99", "urgent_wait_p95", "took_mean", "took_p95", "took_p99", "used",
            "preemptions",
        )  # fmt: skip
        return dict(zip(names, self.row(), strict=True))


def replay(way: str, tasks: int, pipelines: int) -> Replay:
    lives: list[Life] = []
    tokens, available = 0.0, 0.0
    pace = Together(GPUS)
    for seed in range(pipelines):
        drawn = trace(tasks, seed, GPUS, LOAD)
        own = (
            a_gpu_for_each(drawn, GPUS)
            if way == "alone"
            else on_a_pipeline(drawn, BUDGET, GPUS, pace, way, WEIGHTS)
        )
        ended = [life for life in own.values() if life.ended is not None]
        lives += ended
        tokens += sum(life.task.steps * life.task.step_tokens for life in ended)
        available += max(life.ended or 0.0 for life in ended) * GPUS.rate * GPUS.count
    highest = max(life.task.priority for life in lives)
    return Replay(
        waited=[life.waited / 60 for life in lives],
        urgent=[life.waited / 60 for life in lives if life.task.priority == highest],
        took=[life.took / 60 for life in lives],
        used=tokens / available,
        preemptions=sum(life.preemptions for life in lives),
    )


def _percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
