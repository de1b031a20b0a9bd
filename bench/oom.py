"""``python -m bench oom``: tasks against a hard memory budget.

A real worker with one stage may use no more than its budget (``RLIMIT_DATA`` beside the model). 200 random tasks wait for
it. The operator's memory model, learned from the worker's reports, says who may train together; tasks are let in in order,
whoever fits, as long as some wait. Counted are the times that memory ran out, and how much of the budget was given away
while enough tasks waited: the predicted need of all tasks in training over the budget.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.base import cut_folder, smollm2_folder
from bench.options import parser
from bench.ranks import MODEL_NAME, Ranks, logs_of
from bench.report import last_line, table
from mlora_operator.memory.learned import learn
from mlora_operator.memory.model import MemoryModel, demand_of
from mlora_worker.protocol import (
    Dataset,
    FailureReason,
    LoRAConfig,
    Report,
    Schedule,
    TaskPhase,
    TaskPlan,
    Training,
)

TASKS, QUICK_TASKS = 200, 12
BUDGET = 640 * 2**20
MICROBATCH_TOKENS = 512
ENOUGH_WAITING = 24  # while more wait, whoever fits is there: the steady state
TARGETS = (("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj"), ("all-linear",))


def main(arguments: list[str]) -> int:
    options = parser("oom", __doc__).parse_args(arguments)
    count = QUICK_TASKS if options.quick else TASKS
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = cut_folder(smollm2_folder(), 1, Path(scratch) / "model")
        ranks = Ranks(folder, 1, Path(scratch) / "ranks", options.threads)
        ranks.config = ranks.config.model_copy(
            update={"memory_budget": BUDGET, "microbatch_tokens": MICROBATCH_TOKENS}
        )
        with ranks:
            tasks = [_task(number, Path(scratch)) for number in range(count)]
            run = Run(tasks)
            run.through(ranks)
            log = logs_of(Path(scratch) / "ranks")
    ooms = run.ooms + log.count("ran out of memory")
    used = median(run.used) if run.used else 0.0
    head = ["", "tasks", "succeeded", "out of memory", "budget used", "most at once", "seconds"]
    seconds = time.perf_counter() - began
    print(table(head, [["1 stage", count, run.succeeded, ooms, used, run.most, seconds]]))
    result = {
        "ooms": ooms,
        "used": used,
        "tasks": count,
        "succeeded": run.succeeded,
        "most_at_once": run.most,
        "budget": BUDGET,
        "seconds": seconds,
    }
    print(last_line("oom", result, repetitions=1, threads=options.threads, quick=options.quick))
    return 0


class Run:
    """Lets tasks in as the model allows, until all have ended."""

    def __init__(self, tasks: Sequence[TaskPlan]) -> None:
        self._waiting, self._inside = list(tasks), dict[str, TaskPlan]()
        self.ooms = self.succeeded = self.most = 0
        self.used: list[float] = []

    def through(self, ranks: Ranks) -> None:
        ranks.plan([])
        for _, report in ranks.reports():
            if self._note_ends(report) or not self._inside:
                if not self._waiting and not self._inside:
                    return
                self._let_in(report, ranks)

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
            if model.verdict((*self._inside, task.uid)).fits:
                self._inside[task.uid] = task
                self._waiting.remove(task)
        self.most = max(self.most, len(self._inside))
        if len(self._waiting) > ENOUGH_WAITING:
            self.used.append(model.verdict(self._inside).needed / BUDGET)
        ranks.plan([*self._inside.values()])


def _task(number: int, scratch: Path) -> TaskPlan:
    """With rows as long as they may be, all of which is learned: what it may take, it takes."""
    chance = random.Random(number)
    longest = chance.choice((32, 64, 96, 128))
    row = {"prompt": "?", "completion": "one more clip of many " * longest}
    return TaskPlan(
        uid=f"task-{number}",
        namespace="bench",
        name=f"task-{number}",
        admitted=True,
        base_model=MODEL_NAME,
        lora=LoRAConfig(
            rank=chance.choice((8, 32, 64, 128)), alpha=16, target_modules=chance.choice(TARGETS)
        ),
        dataset=Dataset(inline="\n".join([json.dumps(row)] * 4)),
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
