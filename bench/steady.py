"""Tokens per second of a running pipeline, from its reports, once it is filled."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.ranks import Ranks
from bench.sides import Disagreement
from mlora_worker.data.prepare import TokenRow
from mlora_worker.data.training_rows.step_order import StepPlan
from mlora_worker.protocol import TaskPhase, TaskPlan


@dataclass(frozen=True)
class Window:
    """From the end of one step of the first task to the end of a later one; other tasks' steps within it count."""

    tokens: int
    seconds: float
    busy: tuple[float, ...]  # processor seconds of each rank
    losses: Mapping[tuple[int, int], float]  # (task, step) -> mean loss, as far as a report showed it

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def tokens_of(rows: Sequence[TokenRow], plan: TaskPlan, first: int, last: int) -> int:
    """Of steps ``first`` to ``last`` of a task, both from 1 and inclusive."""
    steps = StepPlan(len(rows), plan.training)
    return sum(len(rows[i].ids) for step in range(first, last + 1) for i in steps.rows_of_step(step))


def run_window(
    ranks: Ranks, plans: Sequence[TaskPlan], rows: Sequence[TokenRow], warm: int, steps: int
) -> Window:
    """Let ``plans`` join at once; measure ``steps`` steps of the first task after ``warm`` ones; withdraw them all.

    Each plan must have more than ``warm + steps`` steps, so that the pipeline stays full.
    """
    assert all((plan.training.max_steps or 0) > warm + steps for plan in plans)
    ranks.plan([plan.model_copy(update={"admitted": False}) for plan in plans])
    ranks.wait_for(
        lambda report: (
            len(report.tasks) == len(plans) and all(task.phase is TaskPhase.PREPARED for task in report.tasks)
        )
    )
    ranks.plan(plans)
    numbers = {plan.uid: number for number, plan in enumerate(plans)}
    losses: dict[tuple[int, int], float] = {}
    began: tuple[float, dict[str, int], list[float]] | None = None
    for came, report in ranks.reports():
        done = {task.uid: task.step for task in report.tasks}
        losses |= {
            (numbers[task.uid], task.step): task.loss
            for task in report.tasks
            if task.step and task.loss is not None
        }
        first = done[plans[0].uid]
        if began is None:
            if first >= warm:
                began = came, done, [processor_seconds(pid) for pid in ranks.pids]
        elif first >= warm + steps:
            busy = [processor_seconds(pid) - before for pid, before in zip(ranks.pids, began[2], strict=True)]
            break
    assert began is not None
    ranks.plan([])
    ranks.wait_for(lambda report: not report.tasks)
    tokens = sum(tokens_of(rows, plan, began[1][plan.uid] + 1, done[plan.uid]) for plan in plans)
    return Window(tokens, came - began[0], tuple(busy), losses)


def check_same_losses(one: Window, other: Window, tolerance: float) -> int:
    """Compare the losses of steps that both showed; gives how many. Raises Disagreement."""
    common = one.losses.keys() & other.losses.keys()
    for key in sorted(common):
        a, b = one.losses[key], other.losses[key]
        if not abs(a - b) <= tolerance * abs(a):
            raise Disagreement(
                f"task {key[0]}, step {key[1]}: loss {a:.6f} on one side, {b:.6f} on the other"
            )
    if not common:
        raise Disagreement("no step's loss was seen on both sides")
    return len(common)


def processor_seconds(pid: int) -> float:
    """User and system time of all threads of a process; a rank that waits uses none."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
