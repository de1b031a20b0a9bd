"""What a user should know of a task's rows while it trains all the same. Pure."""

from __future__ import annotations

from mlora_operator.api import conditions as c
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.state.decision import Event
from mlora_operator.reconcile.state.snapshot import Task


def row_events(task: Task, status: TaskStatus) -> list[Event]:
    """Of rows that were cut, once: with the write by which the counts come into the status, where they stay."""
    before, counts = task.status.data, status.data
    if counts is None or not counts.truncated or (before is not None and before.truncated):
        return []
    asked = task.spec.training.max_seq_length if task.spec is not None else None
    limit = (
        f"training.maxSeqLength ({asked} tokens)"
        if asked is not None
        else "the default of training.maxSeqLength"
    )
    message = (
        f"{counts.truncated:,} of {counts.used:,} rows are longer than {limit} and were cut: raise it, or set "
        f"training.overlong in a new task"
    )
    return [Event("LoRATask", task.key, task.uid, "Warning", c.REASON_ROWS_TRUNCATED, message)]
