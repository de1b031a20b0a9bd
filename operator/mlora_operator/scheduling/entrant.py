"""A task as the scheduler sees it: who it is, where it stands, how far it has come. Pure.

    waiting -> starting -> running -> saving -> (ends)
       ^                      |
       +------ leaving <------+

A task leaves for a higher one or because it was suspended. All but a waiting task hold memory: one that leaves keeps it
until the worker has written its checkpoint and says that it is out. Only a running task can be told to leave; one that
starts has to begin first, and one that saves is done anyway.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from mlora_operator.scheduling.order import Candidate


class EntrantState(StrEnum):
    WAITING = "Waiting"  # ready to train, or back from it; holds no memory
    STARTING = "Starting"  # was told that it may train, and has not begun
    RUNNING = "Running"
    LEAVING = "Leaving"  # was told to leave, and is not out yet
    SAVING = "Saving"  # all steps are complete; the adapter is gathered and uploaded


STAYING = frozenset(
    (EntrantState.STARTING, EntrantState.RUNNING, EntrantState.SAVING)
)  # hold memory and keep it for now


class EntrantProgress(NamedTuple):
    """Optimizer steps done and to do, and tokens of a usual step. None: not known."""

    step: int = 0
    total_steps: int | None = None
    step_tokens: float | None = None

    @property
    def remaining_steps(self) -> int | None:
        return max(0, self.total_steps - self.step) if self.total_steps is not None else None

    @property
    def remaining_tokens(self) -> float | None:
        steps = self.remaining_steps
        return steps * self.step_tokens if steps is not None and self.step_tokens is not None else None

    @property
    def all_tokens(self) -> float | None:
        """Of the whole task, however far it has come."""
        if self.total_steps is None or self.step_tokens is None:
            return None
        return self.total_steps * self.step_tokens

    @property
    def served_tokens(self) -> float:
        """Tokens trained so far; 0 where the size of a step is not known."""
        return self.step * (self.step_tokens or 0.0)


class Entrant(NamedTuple):
    task: Candidate
    state: EntrantState
    since: datetime  # when it was preempted or created, for one that waits; else when it was admitted
    progress: EntrantProgress = EntrantProgress()

    @property
    def uid(self) -> str:
        return self.task.uid
