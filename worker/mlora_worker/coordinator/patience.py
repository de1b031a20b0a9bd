"""Trying again what may pass, a store's refusal or what the machine lacks: with growing pauses, with the newest keys, for
as long as the task is wanted.

Nobody sleeps in a pool, and nothing that is tried for the first time waits for what has failed before:

1. A try that failed leaves its thread. After its pause it comes back to other threads, those of its lane's ``again``.
2. Where a store gave no answer, what the same namespace wants of the same endpoint goes there from the beginning, until it
   has answered: a store that swallows requests holds a thread for minutes.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, TypeVar

from mlora_worker.coordinator.tasks import TaskRun
from mlora_worker.data.errors import Interrupted
from mlora_worker.log_lines import about
from mlora_worker.pipeline.faults import is_out_of_memory
from mlora_worker.protocol import FailureReason, TaskPhase
from mlora_worker.storage.errors import StorageError, StoreUnreachable

log = logging.getLogger(__name__)

Result = TypeVar("Result")
CallLater = Callable[[float, Callable[[], None]], None]  # in so many seconds, and returns at once

LONGEST_PAUSE = 30.0  # seconds
FEW_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds between the tries of what has an end


def pauses(first: float = 1.0, longest: float = LONGEST_PAUSE) -> Iterator[float]:
    """Seconds between tries, without end."""
    while True:
        yield first
        first = min(2 * first, longest)


class Withdrawn(Exception):
    """Nobody wants it any more."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Threads for one kind of work: its first tries, and apart from them those that follow a failure."""

    first: Executor
    again: Executor


@dataclass(frozen=True, slots=True)
class Attempt(Generic[Result]):
    """What is to be done for a task. All its functions are called in a lane's threads, without the lock."""

    task: TaskRun
    what: str  # such as "uploading the adapter"
    work: Callable[[], Result]  # opens its store anew, so that it has the keys of the newest plan
    done: Callable[[Result], None]
    lost: Callable[[Exception], None]  # told ``Withdrawn``, or an error that no further try would mend
    # Whatever its store says may pass, and meanwhile the task's report says why it waits. Else a store that gives no
    # answer, and a machine that lacks something, are tried a few times more, and any other error is final.
    endless: bool = True

    @property
    def store(self) -> tuple[str, str | None]:
        return self.task.plan.namespace, self.task.plan.storage.endpoint

    def may_pass(self, error: Exception) -> bool:
        return isinstance(error, StorageError if self.endless else StoreUnreachable) or is_the_machines(error)


class Patience:
    """``changed`` guards the tasks' state. ``on_change`` is called with it held."""

    def __init__(
        self, *, changed: threading.Condition, on_change: Callable[[], None], later: CallLater
    ) -> None:
        self._changed, self._on_change, self._later = changed, on_change, later
        self._silent: set[tuple[str, str | None]] = set()  # stores that gave no answer when last asked

    def begin(self, lane: Lane, attempt: Attempt[Result]) -> None:
        """With the lock held or without it."""
        lane.first.submit(self._first, lane, attempt, pauses() if attempt.endless else iter(FEW_PAUSES))

    def _first(self, lane: Lane, attempt: Attempt[Result], rest: Iterator[float]) -> None:
        if attempt.store in self._silent:
            lane.again.submit(self._try, lane, attempt, rest)
        else:
            self._try(lane, attempt, rest)

    def _try(self, lane: Lane, attempt: Attempt[Result], rest: Iterator[float]) -> None:
        """``rest``: the pauses that are left."""
        task = attempt.task
        with about(task.plan):
            try:
                if task.withdrawn:
                    raise Withdrawn(task.name)
                result = attempt.work()
            except Exception as error:
                self._failed(lane, attempt, rest, error)
                return
            with self._changed:
                self._silent.discard(attempt.store)
                if task.blocked is not None:
                    task.blocked = None
                    self._on_change()
            attempt.done(result)

    def _failed(self, lane: Lane, attempt: Attempt[Result], rest: Iterator[float], error: Exception) -> None:
        with self._changed:
            if isinstance(error, StoreUnreachable):
                self._silent.add(attempt.store)
        seconds = next(rest, None) if attempt.may_pass(error) else None
        if seconds is None:
            attempt.lost(error)
            return
        task, what = attempt.task, attempt.what
        reason, message = _blocked_by(task, error)
        log.warning("%s of %s failed, next try in %.0f s: %s", what, task.name, seconds, message)
        if attempt.endless:
            with self._changed:
                task.block(reason, f"{what} failed and is tried again: {message}")
                self._on_change()

        def come_back() -> None:
            lane.again.submit(self._try, lane, attempt, rest)

        self._later(seconds, come_back)


def is_the_machines(error: Exception) -> bool:
    """Memory, files, processes or threads lack at the moment, or a disk fails: that is no task's doing."""
    if isinstance(error, Interrupted | OSError) or is_out_of_memory(error):
        return True
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def told_of(error: Exception) -> tuple[FailureReason, str]:
    """Reason and message of an error, in a report."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, FailureReason):
        return reason, str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FailureReason.INSUFFICIENT_SPACE, f"rank 0's own volume is full: {error}"
    where = "rank 0 lacks memory, files or processes for it: " if is_the_machines(error) else ""
    return FailureReason.INTERNAL_ERROR, f"{where}{type(error).__name__}: {error}"


def _blocked_by(task: TaskRun, error: Exception) -> tuple[FailureReason, str]:
    reason, message = told_of(error)
    if isinstance(error, Interrupted):  # it is not the rows' fault as long as it is tried again
        reason = FailureReason.INTERNAL_ERROR
    elif reason is FailureReason.DATASET_NOT_FOUND and task.phase is not TaskPhase.PREPARING:
        reason = FailureReason.UPLOAD_FAILED  # its rows are here: what is gone is the place of its output
    return reason, message
