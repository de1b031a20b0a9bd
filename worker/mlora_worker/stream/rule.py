"""When a microbatch may enter the pipeline. Pure: the coordinator drives it, and so does the simulator.

Rule:

1. Tasks that are in the stream travel as ``planner.py`` says: in which groups, and in how many microbatches each group's
   step is cut. The plan changes only when a task joins or leaves.
2. A group's next step may enter when the former step of every one of its tasks has come back to rank 0, which implies
   that it is done on every stage.
3. Groups take turns; the microbatches of one step enter one after the other.
4. A task that leaves does so when its step has come back; the pipeline is never flushed.
5. A step that is repeated to find the cause of a fault travels alone: it enters when nothing else is in the pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from mlora_worker.stream.costs import StageCost, even_costs
from mlora_worker.stream.grouping import Part, split_step
from mlora_worker.stream.planner import Group, StreamPlan, TaskLoad, plan_stream

RowLengths = Sequence[int]


class IssueRule:
    """Decides what enters next. Not thread-safe: one thread asks and tells."""

    def __init__(self, stages: int, budget: int, costs: Sequence[StageCost] | None = None) -> None:
        """``budget``: most tokens of a microbatch. ``costs``: of each stage; None when nothing is known of them."""
        self._costs = tuple(costs) if costs is not None else even_costs(stages)
        self._budget = budget
        self._loads: dict[str, TaskLoad] = {}  # of the tasks in the stream, in joining order
        self._plan = plan_stream({}, self._costs, budget)
        self._groups: deque[Group] = deque()
        self._outstanding: dict[str, int] = {}  # microbatches of the task's step that are not back yet
        self._cut: deque[tuple[Part, ...]] = deque()  # of a step that has begun to enter

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self._loads)

    @property
    def plan(self) -> StreamPlan:
        """How the tasks of now travel, and what that should give."""
        return self._plan

    @property
    def in_flight(self) -> int:
        """Tasks with a step in the pipeline."""
        return len(self._outstanding)

    def join(
        self, task: str, tokens_per_step: int, rows_per_step: int | None = None, spread: float = 0.0
    ) -> None:
        """Add a task. What its usual step holds only serves to plan; see ``TaskLoad``. Without ``rows_per_step`` it is
        taken to be cut anywhere.
        """
        if task in self._loads:
            raise ValueError(f"task {task} is in the stream already")
        tokens = max(1, tokens_per_step)
        self._loads[task] = TaskLoad(tokens, min(rows_per_step or tokens, tokens), spread)
        self._regroup()

    def leave(self, task: str) -> None:
        """Remove a task none of whose microbatches is outstanding."""
        if task in self._outstanding:
            raise ValueError(f"task {task} has a step in flight")
        del self._loads[task]
        self._regroup()

    def limit(self, task: str, tokens: int) -> None:
        """Microbatches with rows of ``task`` have at most ``tokens`` from now on, until it leaves. Never raises a limit."""
        load = self._loads[task]
        self._loads[task] = replace(load, limit=max(1, min(tokens, self.budget_of([task]))))
        self._regroup()

    def is_idle(self, task: str) -> bool:
        """No microbatch of the task is in the pipeline or about to enter."""
        return task not in self._outstanding

    def next(
        self, rows_of: Callable[[str], RowLengths], may_start: Callable[[str], bool]
    ) -> tuple[Part, ...] | None:
        """The next microbatch, or None when all groups wait for a step to come back.

        ``rows_of`` gives the row lengths of a task's next step; ``may_start`` holds a task back that has no further step
        (its group goes on without it).
        """
        if self._cut:
            return self._cut.popleft()
        for _ in range(len(self._groups)):
            group = self._groups[0]
            self._groups.rotate(-1)
            if any(task in self._outstanding for task in group.tasks):
                continue
            members = [task for task in group.tasks if may_start(task)]
            if not members:
                continue
            return self._enter([(task, rows_of(task)) for task in members], group.microbatches)
        return None

    def next_alone(self, task: str, rows_of: Callable[[str], RowLengths]) -> tuple[Part, ...] | None:
        """The next microbatch of a step of ``task`` that has the pipeline for itself; None while others are in it."""
        if self._cut:
            return self._cut.popleft()
        if self._outstanding:
            return None
        alone = plan_stream({task: self._loads[task]}, self._costs, self._budget)
        return self._enter([(task, rows_of(task))], alone.microbatches)

    def returned(self, tasks: Sequence[str]) -> tuple[str, ...]:
        """A microbatch with parts of ``tasks`` is back; gives those whose whole step is back now."""
        done = []
        for task in tasks:
            self._outstanding[task] -= 1
            if not self._outstanding[task]:
                del self._outstanding[task]
                done.append(task)
        return tuple(done)

    def _enter(self, rows: Sequence[tuple[str, RowLengths]], wanted: int) -> tuple[Part, ...]:
        cut = split_step(rows, wanted, self.budget_of([task for task, _ in rows]))
        for parts in cut:
            for part in parts:
                self._outstanding[part.task] = self._outstanding.get(part.task, 0) + 1
        self._cut.extend(cut[1:])
        return cut[0]

    def budget_of(self, tasks: Sequence[str]) -> int:
        """Most tokens of a microbatch with rows of these tasks."""
        return min(self._budget, *(self._loads[task].limit or self._budget for task in tasks))

    def _regroup(self) -> None:
        self._plan = plan_stream(self._loads, self._costs, self._budget)
        self._groups = deque(self._plan.groups)
