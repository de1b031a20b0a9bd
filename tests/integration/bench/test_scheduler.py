"""The bound that makespans are compared with, and the ways that a trace is replayed."""

from __future__ import annotations

import pytest

from bench.scheduler import GPUS, decide_often, makespan
from bench.scheduling.bound import least_makespan
from bench.scheduling.pace import Together
from bench.scheduling.rivals import a_gpu_for_each, on_a_pipeline
from bench.scheduling.simulate import SimMemory, SimTask
from bench.scheduling.trace import BUDGET, trace

pytestmark = pytest.mark.integration


def bound(*tasks: SimTask) -> float:
    memory = SimMemory({task.uid: task for task in tasks}, budget=10)
    return least_makespan(tasks, memory, lambda tokens: max(3.0, sum(tokens)))[0]


def test_one_task_needs_its_rounds() -> None:
    assert bound(SimTask("a", 0, 7, 1, own=5)) == pytest.approx(21)


def test_tasks_that_fit_together_share_rounds() -> None:
    assert bound(SimTask("a", 0, 7, 1, own=5), SimTask("b", 0, 5, 1, own=5)) == pytest.approx(21)


def test_tasks_that_do_not_fit_together_do_not() -> None:
    assert bound(SimTask("a", 0, 7, 1, own=6), SimTask("b", 0, 5, 1, own=6)) == pytest.approx(36)


def test_nobody_is_faster_than_the_bound() -> None:
    found = makespan(2, orders=20)
    assert 1 - 1e-6 <= found.best <= found.ours < 1.5
    assert found.is_optimum
    assert not found.is_same


def test_tasks_that_all_fit_at_once_take_as_long_in_any_order() -> None:
    found = makespan(1, orders=5)
    assert found.is_same
    assert found.best == found.ours


def test_decisions_are_timed() -> None:
    assert all(0 < part < whole for whole, part in decide_often(2))


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
