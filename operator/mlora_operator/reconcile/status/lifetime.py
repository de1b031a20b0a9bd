"""What only time decides of a task: its deadlines, and when a finished one is removed. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from mlora_operator.reconcile.state.decode import parse_time
from mlora_operator.reconcile.state.snapshot import Task
from mlora_operator.reconcile.status.retries import is_asked_for
from mlora_worker.protocol import TaskPhase, TaskReport


def overdue(task: Task, now: datetime) -> str | None:
    """Why an unfinished task has to end, or None.

    1. One that has never had a place counts from when it was created, or tried again.
    2. One that had one counts from its first place, whatever it did since: preemptions, restarts and suspension count.
    """
    if task.spec is None or not task.has_deadline:
        return None
    started, limit = task.status.start_time, task.spec.active_deadline_seconds
    if started is None:
        limit = task.spec.start_deadline_seconds
        since = parse_time(task.status.retry_time) if task.status.retry_time else task.created
        if limit is None or now < since + timedelta(seconds=limit):
            return None
        return (
            f"it was not admitted within {limit} s (spec.startDeadlineSeconds){_last_words(task)}; raise the "
            f"deadline and set the annotation mlora.dev/retry to a new value to retry"
        )
    if limit is None or now < parse_time(started) + timedelta(seconds=limit):
        return None
    return (
        f"it did not finish within {limit} s after its start (spec.activeDeadlineSeconds); its checkpoint is kept: "
        f"raise the deadline and set the annotation mlora.dev/retry to a new value to resume"
    )


def as_leaving(task: Task, now: datetime) -> Task:
    """An overdue task leaves as one that its user suspends: behind its checkpoint, and nobody waits for it."""
    if task.spec is None or not task.has_deadline or task.spec.suspend or overdue(task, now) is None:
        return task
    return replace(task, spec=task.spec.model_copy(update={"suspend": True}))


def is_out(reported: TaskReport | None) -> bool:
    """Nothing of it is in the pipeline, so that ending it now loses nothing."""
    return reported is None or reported.phase in (
        TaskPhase.PREPARING,
        TaskPhase.PREPARED,
        TaskPhase.PREEMPTED,
    )


def outlived(task: Task, now: datetime) -> bool:
    """It finished, and ``spec.ttlSecondsAfterFinished`` is over. One that is about to be tried again stays."""
    seconds = task.spec.ttl_seconds_after_finished if task.spec is not None else None
    if seconds is None or task.deleting or not task.finished or is_asked_for(task):
        return False
    ended = task.status.completion_time
    if ended is None:
        return False
    return now >= parse_time(ended) + timedelta(seconds=seconds)


def _last_words(task: Task) -> str:
    """What kept it from starting, as its conditions say."""
    told = [one for one in task.status.conditions if one.status == "False" and one.message]
    return f": {told[-1].reason}: {told[-1].message}"[:1024] if told else ""
