"""``python -m bench oom``: tasks against a hard memory budget.

A real worker with one stage may use no more than its budget (``RLIMIT_DATA`` beside the model). 200 random tasks wait for
it. The operator's memory model, learned from the worker's reports, says who may train together; tasks are let in in order,
whoever fits, as long as some wait. Counted are the times that memory ran out, and how much of the budget was in use while
enough tasks waited: the worker measures each microbatch at torch's allocator, to the byte, and adds the frozen weights and
the adapters that are loaded. ``used`` is the mean, over the times between two changes of who is admitted, of the most that
was in use; ``used_always`` is the mean over all microbatches. Beside it stands what was predicted for the tasks that were
admitted.

A second story (``restless.py``) is the same at a store that takes its time, while tasks are suspended, resumed, displaced
and tried again all the time. The last line has ``ooms`` of both stories together and the lesser ``used``; the figures of
each stand below its name. ``--story`` tells one of them alone.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.base import cut_folder, smollm2_folder
from bench.options import parser
from bench.ranks import MODEL_NAME, Ranks, logs_of
from bench.report import last_line, table
from bench.restless import Restless, Time
from bench.slow_store import SlowStore, slow_store
from mlora_operator.memory.learned import learn
from mlora_operator.memory.model import MemoryModel, demand_of
from mlora_worker.protocol import (
    Dataset,
    DatasetFormat,
    FailureReason,
    LoRAConfig,
    Report,
    Schedule,
    TaskPhase,
    TaskPlan,
    Training,
)

TASKS, QUICK_TASKS = 200, 12
BUDGET = 384 * 2**20
MICROBATCH_TOKENS = 256
RESTLESS_TASKS = 80
RESTLESS_BUDGET = 224 * 2**20  # so that some eight of them train at once
PACE = 20e6  # bytes a second of each object on its way
HEAD = ["", "tasks", "succeeded", "out of memory", "used", "always", "predicted", "most at once", "seconds"]
ENOUGH_WAITING = 24  # while more wait, whoever fits is there: the steady state
TARGETS = (("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj"), ("all-linear",))


def main(arguments: list[str]) -> int:
    made = parser("oom", __doc__)
    made.add_argument("--tasks", type=int, default=TASKS, help=f"how many there are (default: {TASKS})")
    made.add_argument("--story", choices=("both", *STORIES), default="both", help="which one (default: both)")
    options = made.parse_args(arguments)
    told = {name: story(options) for name, story in STORIES.items() if options.story in ("both", name)}
    print(
        table(
            HEAD,
            [
                [name, *(one[column] for column in ("tasks", "succeeded", "ooms", "used", "used_always")),
                 one["predicted"], one["most_at_once"], one["seconds"]]
                for name, one in told.items()
            ],
        )
    )  # fmt: skip
    result = {
        "ooms": sum(one["ooms"] for one in told.values()),
        "used": min(one["used"] for one in told.values()),
        **told,
    }
    print(last_line("oom", result, repetitions=1, threads=options.threads, quick=options.quick))
    return 0


def restless(options: argparse.Namespace) -> dict[str, Any]:
    """Tasks that come and go, at a slow store."""
    count = QUICK_TASKS if options.quick else max(1, options.tasks * RESTLESS_TASKS // TASKS)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        with (
            slow_store(scratch / "store", PACE) as store,
            _ranks(scratch, options.threads, RESTLESS_BUDGET) as ranks,
        ):
            tasks = [_restless(_task(number, scratch), number, store) for number in range(count)]
            run = Restless(tasks, RESTLESS_BUDGET, MICROBATCH_TOKENS, min(ENOUGH_WAITING, count // 4))
            run.through(ranks)
            log = logs_of(scratch / "ranks")
    return {
        **_figures(run.times),
        "ooms": run.ooms,
        "ran_out": log.count("ran out"),  # each was cured; in the end of the log
        "tasks": count,
        "succeeded": run.succeeded,
        "failures": run.failures[:3],
        "too_large": run.too_large,
        "most_at_once": run.most,
        "most_held": run.most_held,
        "suspensions": run.suspensions,
        "displacements": run.displacements,
        "retries": run.retries,
        "budget": RESTLESS_BUDGET,
        "pace": PACE,
        "seconds": time.perf_counter() - began,
    }


def steady(options: argparse.Namespace) -> dict[str, Any]:
    """Tasks that are let in once."""
    count = QUICK_TASKS if options.quick else options.tasks
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        with _ranks(scratch, options.threads) as ranks:
            run = Run([_task(number, scratch) for number in range(count)])
            run.through(ranks)
            log = logs_of(scratch / "ranks")
    return {
        **_figures(run.times),
        "ooms": run.ooms + log.count("ran out of memory"),
        "tasks": count,
        "succeeded": run.succeeded,
        "too_large": run.too_large,
        "most_at_once": run.most,
        "budget": BUDGET,
        "seconds": time.perf_counter() - began,
    }


STORIES: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "steady": steady,
    "restless": restless,
}


def _ranks(scratch: Path, threads: int, budget: int = BUDGET) -> Ranks:
    """One stage."""
    folder = cut_folder(smollm2_folder(), 1, scratch / "model")
    ranks = Ranks(folder, 1, scratch / "ranks", threads)
    ranks.config = ranks.config.model_copy(
        update={"memory_budget": budget, "microbatch_tokens": MICROBATCH_TOKENS, "measure_every": 1}
    )
    return ranks


def _figures(times: Sequence[Time]) -> dict[str, Any]:
    measured = [one for one in times if one.used]
    return {
        "used": fmean(max(one.used) for one in measured) if measured else 0.0,
        "used_always": fmean(used for one in measured for used in one.used) if measured else 0.0,
        "used_most": max((max(one.used) for one in measured), default=0.0),
        "predicted": fmean(one.predicted for one in measured) if measured else 0.0,
        "microbatches": sum(len(one.used) for one in measured),
    }


class Run:
    """Lets tasks in as the model allows, until all have ended."""

    def __init__(self, tasks: Sequence[TaskPlan]) -> None:
        self._waiting, self._inside = list(tasks), dict[str, TaskPlan]()
        self._enough = min(ENOUGH_WAITING, len(tasks) // 4)
        self._ready: set[str] = set()  # prepared, as of the newest report
        self._seen = 0  # number of the newest microbatch whose sample was noted
        self.ooms = self.succeeded = self.most = self.too_large = 0
        self.times: list[Time] = []

    def through(self, ranks: Ranks) -> None:
        self._plan(ranks)
        for _, report in ranks.reports(tasks_may_fail=True):
            self._note_use(report)
            if self._note_ends(report) or self._has_prepared(report):
                if self._waiting or self._inside:
                    self._let_in(report, ranks)
                if not self._waiting and not self._inside:
                    return

    def _note_use(self, report: Report) -> None:
        fresh = [one for one in report.memory if one.item > self._seen and not one.calibration]
        self._seen = max((one.item for one in fresh), default=self._seen)
        if self.times and self.times[-1].full and len(self._waiting) > self._enough:
            self.times[-1].used += [one.used_bytes / BUDGET for one in fresh]

    def _note_ends(self, report: Report) -> bool:
        """Whether somebody has ended."""
        self.ooms = max(self.ooms, len(report.exhausted))
        ended = [
            task
            for task in report.tasks
            if task.uid in self._inside and task.phase in (TaskPhase.SUCCEEDED, TaskPhase.FAILED)
        ]
        for task in ended:
            del self._inside[task.uid]
            self.succeeded += task.phase is TaskPhase.SUCCEEDED
            self.ooms += task.failure is not None and task.failure.reason is FailureReason.OUT_OF_MEMORY
        return bool(ended)

    def _has_prepared(self, report: Report) -> bool:
        """Whether somebody more has its rows ready."""
        ready = {task.uid for task in report.tasks if task.phase is TaskPhase.PREPARED}
        news = ready - self._ready
        self._ready = ready
        return bool(news)

    def _let_in(self, report: Report, ranks: Ranks) -> None:
        assert report.facts is not None
        facts = report.facts
        demands = {
            task.uid: demand_of(task.lora, task.training, facts.max_positions)
            for task in (*self._inside.values(), *self._waiting)
        }
        blank = MemoryModel(facts, report.stages, MICROBATCH_TOKENS, BUDGET, 0.0, demands)
        model = replace(blank, learned=learn(blank, (), report.memory, report.exhausted))
        for task in list(self._waiting):
            if task.uid in self._ready and model.check((*self._inside, task.uid)).fits:
                self._inside[task.uid] = task
                self._waiting.remove(task)
        if not self._inside:  # who does not fit alone never will
            large = [task for task in self._waiting if task.uid in self._ready]
            self.too_large += len(large)
            self._waiting = [task for task in self._waiting if task not in large]
        self.most = max(self.most, len(self._inside))
        full = any(task.uid in self._ready for task in self._waiting)
        self.times.append(Time(model.check(self._inside).needed / BUDGET, full))
        self._plan(ranks)

    def _plan(self, ranks: Ranks) -> None:
        """As the operator does: who waits is known already, so that its rows are prepared when there is room."""
        waiting = [task.model_copy(update={"admitted": False}) for task in self._waiting]
        ranks.plan([*self._inside.values(), *waiting])


def _restless(task: TaskPlan, number: int, store: SlowStore) -> TaskPlan:
    """Longer, and at the slow store."""
    training = task.training.model_copy(
        update={"max_steps": random.Random(number).randint(6, 18), "checkpoint_every_steps": 4}
    )
    output = f"s3://bench/{task.name}"
    return task.model_copy(update={"training": training, "output_uri": output, "storage": store.access})


def _task(number: int, scratch: Path) -> TaskPlan:
    """With rows as long as they may be, all of which is learned: what it may take, it takes."""
    chance = random.Random(number)
    longest = chance.choice((16, 32, 48, 64))
    row = {"text": "one more clip of many " * longest}
    return TaskPlan(
        uid=f"task-{number}",
        namespace="bench",
        name=f"task-{number}",
        admitted=True,
        base_model=MODEL_NAME,
        lora=LoRAConfig(
            rank=chance.choice((8, 32, 64, 128)), alpha=16, target_modules=chance.choice(TARGETS)
        ),
        dataset=Dataset(inline="\n".join([json.dumps(row)] * 4), format=DatasetFormat.TEXT),
        training=Training(
            batch_size=chance.randint(1, 4),
            max_steps=chance.randint(2, 4),
            learning_rate=1e-4,
            schedule=Schedule.CONSTANT,
            max_seq_length=longest,
            seed=number,
            checkpoint_every_steps=0,
        ),
        output_uri=f"file://{scratch}/out/{number}",
    )
