"""An issue rule whose plan is given instead of made: to look at schedules, and to compare them with the formulae. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mlora_worker.stream.planner import Group, StreamPlan
from mlora_worker.stream.rule import IssueRule


class FixedRule(IssueRule):
    """Tasks travel in the given groups, and every group's step is cut into so many microbatches."""

    def __init__(
        self, stages: int, budget: int, microbatches: int, groups: Sequence[Sequence[str]] | None = None
    ) -> None:
        """``groups`` None: each task is a group of its own. Tasks that are in none travel alone."""
        self._microbatches = microbatches
        self._given = groups or ()
        super().__init__(stages, budget)

    def _regroup(self) -> None:
        given = [tuple(task for task in group if task in self._loads) for group in self._given]
        together = {task for group in given for task in group}
        groups = [group for group in given if group] + [
            (task,) for task in self._loads if task not in together
        ]
        self._plan = StreamPlan(tuple(self._group(tasks) for tasks in groups))
        self._groups = deque(self._plan.groups)

    def _group(self, tasks: tuple[str, ...]) -> Group:
        tokens = sum(self._loads[task].tokens for task in tasks)
        return Group(tasks, tokens, self._microbatches, -(-tokens // self._microbatches))
