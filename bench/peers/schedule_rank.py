"""``python -m bench.peers.schedule_rank``: one rank that trains as a peer does when it is told to: with GPipe or 1F1B, with
sharded weights, or with tensor parallelism.

``BENCH_JOB`` holds a ``Job`` as JSON, ``BENCH_RANK`` the rank's number. Each line of standard input is an ``Order``; the
answer is a line on standard output that begins with ``ANSWER``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from pydantic import BaseModel

from bench.base import transformers_model
from bench.peers.schedules import ScheduledTasks
from bench.peers.sharded import ShardedTasks
from bench.peers.tensor_parallel import TensorParallelTasks
from bench.ranks import HOST, training
from bench.rows import gsm8k_rows
from bench.sides import LEARNING_RATE, Setting
from mlora_worker.data.prepare import TokenRow
from mlora_worker.data.training_rows.step_order import StepPlan

ANSWER = "ANSWER "


class Job(BaseModel):
    folder: Path
    host: str = HOST  # of rank 0
    family: Literal["schedules", "sharded", "tensor_parallel"] = "schedules"
    tasks: int
    targets: tuple[str, ...]
    dropout: float = 0.05
    start: float | None = None  # what every A begins with; None: random numbers
    batch: int
    microbatches: int
    layers: tuple[tuple[int, int], ...]  # of each rank: first, and one after the last
    most_steps: int  # the highest step that is asked for
    port: int
    threads: int


class Tasks(Protocol):
    def fill(self, value: float) -> None:
        """Every A of every adapter."""
        ...

    def step(self, kind: str, number: int, rows: Sequence[TokenRow], learning_rate: float) -> float:
        """One optimizer step of task ``number`` on all ranks; its loss, on the last rank at least."""
        ...


class Order(BaseModel):
    kind: str  # gpipe or 1f1b; the other families have one kind each
    steps: tuple[int, ...]  # of every task, from 1
    tasks: int | None = None  # the first so many; None: all
    fresh: bool = False  # with new adapters


class Answer(BaseModel):
    seconds: float
    losses: dict[str, float]  # "task/step" -> mean loss; on the last rank


def main() -> None:
    job, rank = Job.model_validate_json(os.environ["BENCH_JOB"]), int(os.environ["BENCH_RANK"])
    torch.set_num_threads(job.threads)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{job.host}:{job.port}", rank=rank, world_size=len(job.layers)
    )
    model = transformers_model(job.folder, torch.float32)
    rows = gsm8k_rows(job.folder)
    plans = [
        StepPlan(len(rows), training(job.batch, task, job.most_steps, LEARNING_RATE))
        for task in range(job.tasks)
    ]
    layers = [range(start, stop) for start, stop in job.layers]
    setting = Setting(job.tasks, job.targets, dropout=job.dropout)

    def made() -> Tasks:
        if job.family == "sharded":
            return ShardedTasks(job.folder, setting)
        if job.family == "tensor_parallel":
            return TensorParallelTasks(job.folder, setting)
        return ScheduledTasks(model, setting, layers, rank, job.microbatches)

    def fresh() -> Tasks:
        tasks = made()
        if job.start is not None:
            tasks.fill(job.start)
        return tasks

    tasks = fresh()
    say("ready")
    for line in sys.stdin:
        order = Order.model_validate_json(line)
        if order.fresh:
            tasks = fresh()
        dist.barrier()
        began = time.perf_counter()
        losses = {
            f"{task}/{step}": tasks.step(
                order.kind, task, [rows[i] for i in plan.rows_of_step(step)], LEARNING_RATE
            )
            for step in order.steps
            for task, plan in enumerate(plans[: order.tasks])
        }
        dist.barrier()
        say(Answer(seconds=time.perf_counter() - began, losses=losses).model_dump_json())


def say(text: str) -> None:
    print(ANSWER + text, flush=True)


if __name__ == "__main__":
    main()
