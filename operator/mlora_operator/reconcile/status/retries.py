"""A failed task that its user wants to run again: the annotation ``mlora.dev/retry`` with a new value. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from mlora_operator.api import conditions
from mlora_operator.api.meta import timestamp
from mlora_operator.reconcile.state.decision import Event
from mlora_operator.reconcile.state.snapshot import Contact, Key, Task, is_true


def tried_again(task: Task, contacts: Mapping[Key, Contact], now: datetime) -> Task | None:
    """``task`` as an unfinished one, or None when it is not to run again, or not yet.

    1. A task that succeeded never runs again.
    2. A value that was there before it failed is no new request.
    3. While its coordinator still has it as failed, it has to be forgotten there first: it would fail at once.

    Its step stays: the worker goes on from its checkpoint, if there is one.
    """
    if task.deleting or not is_asked_for(task):
        return None
    held = task.status
    if any(task.uid in contact.tasks for contact in contacts.values()):
        return None
    status = held.model_copy(
        update={
            "conditions": (),
            "state": None,
            "reason": None,
            "start_time": None,
            "completion_time": None,
            "run": None,
            "eta": None,
            "retry": task.retry,
            "retry_time": timestamp(now),
            "retries": (held.retries or 0) + 1,
        }
    )
    return replace(task, status=status)


def is_asked_for(task: Task) -> bool:
    """It failed, and the annotation has another value than then."""
    wished = task.retry is not None and task.retry != task.status.retry
    return wished and is_true(task.status.conditions, conditions.FAILED)


def retry_event(task: Task) -> Event:
    """What the user reads of it."""
    message = "the task is retried because its annotation mlora.dev/retry has a new value"
    return Event("LoRATask", task.key, task.uid, "Normal", conditions.REASON_RETRIED, message)
