"""What a decision cannot be made about stands apart: one object, not all others. Pure.

A report, a spec or a status may be such that something raises that nobody thought of. Bounds and rules keep what is known
out; this is for what is not. The object keeps what it has, its condition says so, and everybody else is decided about as if
it had said nothing:

1. A task: it is as one whose spec is not understood. It trains on where it trains; nothing else begins with it.
2. A pipeline: its workers, its plan and its tasks stay as they are.

What raises is found where it raises, or, among the tasks of a pipeline, by looking at each alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from mlora_operator.api import conditions as c
from mlora_operator.api.meta import Condition
from mlora_operator.api.pipeline import PipelineStatus
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.state.decision import Fault
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Task, condition
from mlora_operator.reconcile.status.conditions import Wish, conclude

T = TypeVar("T")


class Apart:
    """Of one decision."""

    def __init__(self) -> None:
        self.tasks: dict[Key, Fault] = {}
        self.pipelines: dict[Key, Fault] = {}

    @property
    def faults(self) -> tuple[Fault, ...]:
        return (*self.pipelines.values(), *self.tasks.values())

    def task(self, task: Task, error: Exception) -> None:
        self.tasks.setdefault(task.key, Fault("LoRATask", task.key, task.uid, error))

    def pipeline(self, pipeline: Pipeline, error: Exception) -> None:
        self.pipelines.setdefault(pipeline.key, Fault("LoRAPipeline", pipeline.key, pipeline.uid, error))

    def of_task(self, task: Task, work: Callable[[], T], otherwise: T) -> T:
        """What ``work`` says, which is about this task alone."""
        try:
            return work()
        except Exception as error:
            self.task(task, error)
            return otherwise

    def of_pipeline(self, pipeline: Pipeline, work: Callable[[], T], otherwise: T) -> T:
        """What ``work`` says, which is about this pipeline alone."""
        try:
            return work()
        except Exception as error:
            self.pipeline(pipeline, error)
            return otherwise

    def as_judged(self, task: Task) -> Task:
        """A task that stands apart, as one whose spec is not understood."""
        fault = self.tasks.get(task.key)
        if fault is None or task.spec is None:
            return task
        return not_understood(task, fault)


def not_understood(task: Task, fault: Fault) -> Task:
    return replace(task, spec=None, problem=_of_task(fault))


def culprits(tasks: Iterable[Task], alone: Callable[[Task], object]) -> Mapping[Key, Exception]:
    """Those about which ``alone`` raises."""
    found: dict[Key, Exception] = {}
    for task in tasks:
        try:
            alone(task)
        except Exception as error:
            found[task.key] = error
    return found


def task_status_apart(task: Task, fault: Fault, now: datetime) -> TaskStatus:
    """Its status with the word that it stands apart; all else that it says stays."""
    return _told(task, _of_task(fault), now)


def task_status_at(task: Task, fault: Fault, now: datetime) -> TaskStatus:
    """Of a task whose pipeline stands apart. One that has been told of its pipeline keeps what it has."""
    if condition(task.status.conditions, c.ACCEPTED) is not None:
        return task.status
    return _told(
        task,
        f"{fault.about} serves it, but the operator cannot decide about that pipeline at present (its condition Ready says "
        "why); nothing has to be done here: it is tried again all the time",
        now,
    )


def pipeline_status_apart(pipeline: Pipeline, fault: Fault, now: datetime) -> PipelineStatus:
    """Its status with the word that it stands apart; all else that it says stays."""
    held = pipeline.status
    words = (
        f"the operator cannot decide about this pipeline ({fault.words}): its workers and tasks stay as they are, and it "
        "is tried again all the time. The operator's log says more; if its workers report what cannot be, end them, and "
        "others are started"
    )
    wish = Wish(c.READY, "Unknown", c.REASON_UNDECIDED, words)
    conditions = _with(held.conditions, wish, pipeline.generation, now)
    return held.model_copy(update={"conditions": conditions, "state": "Failed"})


def _told(task: Task, words: str, now: datetime) -> TaskStatus:
    held = task.status
    accepted = condition(held.conditions, c.ACCEPTED)
    wish = Wish(c.ACCEPTED, accepted.status if accepted is not None else "Unknown", c.REASON_UNDECIDED, words)
    status = held.model_copy(
        update={
            "conditions": _with(held.conditions, wish, task.generation, now),
            "state": held.state or "Pending",
            "reason": held.reason or c.REASON_UNDECIDED,
        }
    )
    return held if status == held else status


def _with(held: tuple[Condition, ...], wish: Wish, generation: int, now: datetime) -> tuple[Condition, ...]:
    """``held`` with one condition as it is wished for, first; the others are not touched."""
    others = (one for one in held if one.type != wish.type)
    return (*conclude(held, (wish,), generation, now), *others)


def _of_task(fault: Fault) -> str:
    return (
        f"the operator cannot decide about this task ({fault.words}): it stays as it is, and it is tried again all the "
        "time. The operator's log says more; if something in its spec is unusual, make it anew without that"
    )
