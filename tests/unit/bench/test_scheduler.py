"""The bound that makespans are compared with, and the ways that a trace is replayed."""

from __future__ import annotations

import pytest

from bench.scheduler import GPUS, makespan_ratio
from bench.scheduling.bound import least_makespan
from bench.scheduling.pace import Together
from bench.scheduling.rivals import a_gpu_for_each, on_a_pipeline
from bench.scheduling.trace import BUDGET, trace
from mlora_operator.scheduling.simulate import SimMemory, SimTask


def bound(*tasks: SimTask) -> float:
    memory = SimMemory({task.uid: task for task in tasks}, budget=10)
    return least_makespan(tasks, memory, lambda tokens: max(3.0, sum(tokens)))


def test_one_task_needs_its_rounds() -> None:
    assert bound(SimTask("a", 0, 7, 1, own=5)) == pytest.approx(21)


def test_tasks_that_fit_together_share_rounds() -> None:
    assert bound(SimTask("a", 0, 7, 1, own=5), SimTask("b", 0, 5, 1, own=5)) == pytest.approx(21)


def test_tasks_that_do_not_fit_together_do_not() -> None:
    assert bound(SimTask("a", 0, 7, 1, own=6), SimTask("b", 0, 5, 1, own=6)) == pytest.approx(36)


def test_nobody_is_faster_than_the_bound() -> None:
    assert 1 - 1e-6 <= makespan_ratio(0) < 1.5


@pytest.mark.parametrize("way", ["priority", "fairShare", "shortestRemaining", "fifo", "alone"])
def test_every_way_brings_every_task_to_its_end(way: str) -> None:
    tasks = trace(25, 3, GPUS, 0.9)
    lives = (
        a_gpu_for_each(tasks, GPUS)
        if way == "alone"
        else on_a_pipeline(tasks, BUDGET, GPUS, Together(GPUS), way, {})
    )
    assert len(lives) == 25
    assert all(life.ended is not None and life.done == life.task.steps for life in lives.values())
