"""Trying again what a store refuses: with growing pauses, with the newest keys, for as long as the task is wanted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

from mlora_worker.coordinator.tasks import TaskRun
from mlora_worker.protocol import FailureReason, TaskPhase
from mlora_worker.storage.errors import StorageError

log = logging.getLogger(__name__)

Result = TypeVar("Result")

LONGEST_PAUSE = 30.0  # seconds


def pauses(first: float = 1.0, longest: float = LONGEST_PAUSE) -> Iterator[float]:
    """Seconds between tries, without end."""
    while True:
        yield first
        first = min(2 * first, longest)


class Withdrawn(Exception):
    """Nobody wants it any more."""


def until_stored(
    work: Callable[[], Result],
    task: TaskRun,
    what: str,
    *,
    changed: threading.Condition,
    on_change: Callable[[], None],
    pause: Callable[[float], None],
    turn: AbstractContextManager[object],
) -> Result:
    """What ``work`` gives, tried again while it raises ``StorageError``. Meanwhile the task's report says why.

    ``work`` opens its store anew, so that it has the keys of the newest plan. ``turn`` is held during a try and not during
    a pause: one task's store that is away holds nobody else up. Raises ``Withdrawn``, and errors that are not the store's.
    """
    for seconds in pauses():
        try:
            if task.withdrawn:
                raise Withdrawn(task.name)
            with turn:
                result = work()
        except StorageError as error:
            reason = error.reason
            if reason is FailureReason.DATASET_NOT_FOUND and task.phase is not TaskPhase.PREPARING:
                reason = (
                    FailureReason.UPLOAD_FAILED
                )  # its rows are here: what is gone is the place of its output
            log.warning("%s of %s failed, next try in %.0f s: %s", what, task.name, seconds, error)
            with changed:
                task.block(reason, f"{what} failed and is tried again: {error}")
                on_change()
            pause(seconds)
            continue
        with changed:
            if task.blocked is not None:
                task.blocked = None
                on_change()
        return result
    raise AssertionError("pauses never end")
