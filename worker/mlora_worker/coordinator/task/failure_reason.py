"""Errors of one task's preparing and storing, in the words of its report."""

from __future__ import annotations

import errno

from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.data.errors import Interrupted
from mlora_worker.pipeline.faults import is_out_of_memory
from mlora_worker.protocol import FailureReason, TaskPhase


def is_the_machines(error: Exception) -> bool:
    """Memory, files, processes or threads lack at the moment, or a disk fails: that is no task's doing."""
    if isinstance(error, Interrupted | OSError) or is_out_of_memory(error):
        return True
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def reason_of(error: Exception) -> tuple[FailureReason, str]:
    """Reason and message of an error, in a report."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, FailureReason):
        return reason, str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FailureReason.INSUFFICIENT_SPACE, f"rank 0's own volume is full: {error}"
    where = (
        "rank 0 has too little memory, or too few file handles or processes: "
        if is_the_machines(error)
        else ""
    )
    return FailureReason.INTERNAL_ERROR, f"{where}{type(error).__name__}: {error}"


def blocked_by(task: TaskRun, error: Exception) -> tuple[FailureReason, str]:
    """The same, of what is tried again."""
    reason, message = reason_of(error)
    if isinstance(error, Interrupted):  # it is not the rows' fault as long as it is tried again
        reason = FailureReason.INTERNAL_ERROR
    elif reason is FailureReason.DATASET_NOT_FOUND and task.phase is not TaskPhase.PREPARING:
        reason = FailureReason.UPLOAD_FAILED  # its rows are here: what is gone is the place of its output
    return reason, message
