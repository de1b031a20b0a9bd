"""When a microbatch may enter the pipeline. Pure: the coordinator drives it, and so can a simulator.

Rule:

1. Tasks that are in the stream are grouped (``grouping.py``); the grouping changes only when a task joins or leaves.
2. A group's next step may enter when the former step of every one of its tasks has come back to rank 0, which implies
   that it is done on every stage.
3. Groups take turns; the microbatches of one step enter one after the other.
4. A task that leaves does so when its step has come back; the pipeline is never flushed.
5. A step that is repeated to find the cause of a fault travels alone: it enters when nothing else is in the pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from mlora_worker.stream.grouping import Part, group_tasks, microbatches_wanted, split_step

RowLengths = Sequence[int]


class IssueRule:
    """Decides what enters next. Not thread-safe: one thread asks and tells."""

    def __init__(self, stages: int, budget: int) -> None:
        self._stages = stages
        self._budget = budget
        self._tokens: dict[str, int] = {}  # of the tasks in the stream, in joining order
        self._groups: deque[tuple[str, ...]] = deque()
        self._outstanding: dict[str, int] = {}  # microbatches of the task's step that are not back yet
        self._cut: deque[tuple[Part, ...]] = deque()  # of a step that has begun to enter
        self._limits: dict[
            str, int
        ] = {}  # tokens of a microbatch that a task may share, where less than budget

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self._tokens)

    @property
    def in_flight(self) -> int:
        """Tasks with a step in the pipeline."""
        return len(self._outstanding)

    def join(self, task: str, tokens_per_step: int) -> None:
        """Add a task; ``tokens_per_step`` only balances groups."""
        if task in self._tokens:
            raise ValueError(f"task {task} is in the stream already")
        self._tokens[task] = tokens_per_step
        self._regroup()

    def leave(self, task: str) -> None:
        """Remove a task none of whose microbatches is outstanding."""
        if task in self._outstanding:
            raise ValueError(f"task {task} has a step in flight")
        del self._tokens[task]
        self._limits.pop(task, None)
        self._regroup()

    def limit(self, task: str, tokens: int) -> None:
        """Microbatches with rows of ``task`` have at most ``tokens`` from now on, until it leaves. Never raises a limit."""
        self._limits[task] = max(1, min(tokens, self._budget_of([task])))

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
            if any(task in self._outstanding for task in group):
                continue
            members = [task for task in group if may_start(task)]
            if not members:
                continue
            wanted = microbatches_wanted(len(self._groups), self._stages)
            return self._enter([(task, rows_of(task)) for task in members], wanted)
        return None

    def next_alone(self, task: str, rows_of: Callable[[str], RowLengths]) -> tuple[Part, ...] | None:
        """The next microbatch of a step of ``task`` that has the pipeline for itself; None while others are in it."""
        if self._cut:
            return self._cut.popleft()
        if self._outstanding:
            return None
        return self._enter([(task, rows_of(task))], microbatches_wanted(1, self._stages))

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
        cut = split_step(rows, wanted, self._budget_of([task for task, _ in rows]))
        for parts in cut:
            for part in parts:
                self._outstanding[part.task] = self._outstanding.get(part.task, 0) + 1
        self._cut.extend(cut[1:])
        return cut[0]

    def _budget_of(self, tasks: Sequence[str]) -> int:
        return min(self._budget, *(self._limits.get(task, self._budget) for task in tasks))

    def _regroup(self) -> None:
        self._groups = deque(group_tasks(self._tokens, self._stages))
