"""An object about which no decision can be made is isolated: that one, not all others. Pure.

A report, a spec or a status may be such that something raises that nobody thought of. Bounds and rules keep what is known
out; this is for what is not. Everybody else is decided about as if that object had said nothing:

1. A task: it is as one whose spec is not understood. It trains on where it trains; nothing else begins with it.
2. A pipeline: its workers, its plan and its tasks stay as they are.

What raises is found where it raises, or, among the tasks of a pipeline, by looking at each alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from mlora_operator.reconcile.state.decision import DecisionFault
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Task

T = TypeVar("T")


class Isolation:
    """Of one decision."""

    def __init__(self) -> None:
        self.tasks: dict[Key, DecisionFault] = {}
        self.pipelines: dict[Key, DecisionFault] = {}

    @property
    def faults(self) -> tuple[DecisionFault, ...]:
        return (*self.pipelines.values(), *self.tasks.values())

    def isolate_task(self, task: Task, error: Exception) -> None:
        self.tasks.setdefault(task.key, DecisionFault("LoRATask", task.key, task.uid, error))

    def isolate_pipeline(self, pipeline: Pipeline, error: Exception) -> None:
        self.pipelines.setdefault(
            pipeline.key, DecisionFault("LoRAPipeline", pipeline.key, pipeline.uid, error)
        )

    def try_task(self, task: Task, work: Callable[[], T], otherwise: T) -> T:
        """What ``work`` says, which is about this task alone."""
        try:
            return work()
        except Exception as error:
            self.isolate_task(task, error)
            return otherwise

    def try_pipeline(self, pipeline: Pipeline, work: Callable[[], T], otherwise: T) -> T:
        """What ``work`` says, which is about this pipeline alone."""
        try:
            return work()
        except Exception as error:
            self.isolate_pipeline(pipeline, error)
            return otherwise

    def as_judged(self, task: Task) -> Task:
        """A task that is isolated, as one whose spec is not understood."""
        fault = self.tasks.get(task.key)
        if fault is None or task.spec is None:
            return task
        return not_understood(task, fault)


def not_understood(task: Task, fault: DecisionFault) -> Task:
    return replace(task, spec=None, problem=in_words(fault))


def culprits(tasks: Iterable[Task], alone: Callable[[Task], object]) -> Mapping[Key, Exception]:
    """Those about which ``alone`` raises."""
    found: dict[Key, Exception] = {}
    for task in tasks:
        try:
            alone(task)
        except Exception as error:
            found[task.key] = error
    return found


def in_words(fault: DecisionFault) -> str:
    return (
        f"the operator cannot reconcile this task ({fault.words}): it stays unchanged, and the operator keeps "
        f"retrying. See the operator's log; if its spec has an unusual value, create the task again without it"
    )
