"""An object about which no decision can be made is isolated: that one, not all others. Pure.

A report, a spec or a status may be such that something raises that nobody thought of. Bounds and rules keep what is known
out; this is for what is not. Everybody else is decided about as if that object had said nothing:

1. A task: it is as one whose spec is not understood. It trains on where it trains; nothing else begins with it.
2. A pipeline: its workers, its plan and its tasks stay as they are.

What raises is found where it raises, or, where tasks are judged together, by leaving tasks out (``culprits``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from mlora_operator.reconcile.state.decision import DecisionFault
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Snapshot, Task

_EACH = 16  # so few suspects are left out one by one
T = TypeVar("T")


class Isolation:
    """Of one decision."""

    def __init__(self) -> None:
        self.tasks: dict[Key, DecisionFault] = {}
        self.pipelines: dict[Key, DecisionFault] = {}
        self.whole: dict[Key, Task] = {}  # tasks that are isolated, as they are

    @classmethod
    def of(cls, snapshot: Snapshot) -> Isolation:
        """With what could not even be read."""
        made = cls()
        for task in snapshot.tasks if snapshot.faulty else ():
            if task.uid in snapshot.faulty:
                made.isolate_task(task, snapshot.faulty[task.uid])
        for pipeline in snapshot.pipelines if snapshot.faulty else ():
            if pipeline.uid in snapshot.faulty:
                made.isolate_pipeline(pipeline, snapshot.faulty[pipeline.uid])
        return made

    @property
    def faults(self) -> tuple[DecisionFault, ...]:
        return (*self.pipelines.values(), *self.tasks.values())

    def isolate_task(self, task: Task, error: Exception) -> None:
        self.tasks.setdefault(task.key, DecisionFault("LoRATask", task.key, task.uid, error))
        self.whole.setdefault(task.key, task)

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

    def without(self, tasks: Sequence[Task], work: Callable[[Task], object]) -> tuple[Task, ...]:
        """``tasks`` without those that are isolated, as those are about which ``work`` raises."""
        nothing: object = None
        for task in tasks:
            self.try_task(task, partial(work, task), nothing)
        return tuple(task for task in tasks if task.key not in self.tasks)

    def isolate_culprits(
        self, tasks: Sequence[Task], work: Callable[[tuple[Task, ...]], object]
    ) -> frozenset[Key]:
        """Of ``tasks``, with which ``work`` raised, those without which it raises nothing; see ``culprits``."""
        odd = culprits(tasks, work)
        for task in tasks:
            if task.key in odd:
                self.isolate_task(task, odd[task.key])
        return frozenset(odd)

    def try_together(self, tasks: Sequence[Task], work: Callable[[Sequence[Task]], T]) -> T:
        """What ``work`` says of tasks that are judged together. Those with which it raises are isolated and left out; what
        it raises without any task is raised."""
        try:
            return work(tasks)
        except Exception:
            odd = self.isolate_culprits(tasks, work)
            if not odd:
                raise
        return work([task for task in tasks if task.key not in odd])

    def as_judged(self, task: Task) -> Task:
        """A task that is isolated, as one whose spec is not understood."""
        fault = self.tasks.get(task.key)
        if fault is None or task.spec is None:
            return task
        return not_understood(task, fault)


def not_understood(task: Task, fault: DecisionFault) -> Task:
    return replace(task, spec=None, problem=in_words(fault))


def culprits(tasks: Sequence[Task], work: Callable[[tuple[Task, ...]], object]) -> Mapping[Key, Exception]:
    """Without which tasks ``work`` raises nothing. None: it raises without any task, or not at all.

    1. Those with which it raises though they are alone.
    2. Where the others still make it raise together, one of them if that is enough, else as few as halving finds: a half
       that can be left out has them all, so that it takes some 2 log2(n) tries for each. Where any one of several would
       do, one that has never trained is taken.
    """
    tasks = sorted(tasks, key=lambda task: task.status.start_time is not None)
    if _raised(work, ()) is not None:
        return {}
    found = {task.key: error for task in tasks if (error := _raised(work, (task,))) is not None}
    left = tuple(task for task in tasks if task.key not in found)
    error = _raised(work, left)
    if error is not None:
        found |= dict.fromkeys((task.key for task in _fewest(left, (), work)), error)
    return found


def _fewest(
    suspects: tuple[Task, ...], others: tuple[Task, ...], work: Callable[[tuple[Task, ...]], object]
) -> tuple[Task, ...]:
    """Of ``suspects``, with whom ``work`` raises beside ``others``, and with whom left out it does not."""
    if len(suspects) == 1:
        return suspects
    if len(suspects) <= _EACH:
        for one in suspects:
            if _raised(work, others + tuple(task for task in suspects if task is not one)) is None:
                return (one,)
    half = len(suspects) // 2
    first, second = suspects[:half], suspects[half:]
    if _raised(work, others + second) is None:
        return _fewest(first, others + second, work)
    if _raised(work, others + first) is None:
        return _fewest(second, others + first, work)
    found = _fewest(first, others, work)
    beside = others + tuple(task for task in first if task not in found)
    return found + (_fewest(second, beside, work) if _raised(work, beside + second) is not None else ())


def _raised(work: Callable[[tuple[Task, ...]], object], tasks: tuple[Task, ...]) -> Exception | None:
    try:
        work(tasks)
    except Exception as error:
        return error
    return None


def in_words(fault: DecisionFault) -> str:
    return (
        f"the operator cannot reconcile this task ({fault.words}): it stays unchanged, and the operator keeps "
        f"retrying. See the operator's log; if its spec has an unusual value, create the task again without it"
    )
