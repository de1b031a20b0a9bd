"""What a report says of each task. One report is of all of them: what cannot be told of one is its own failure alone."""

from __future__ import annotations

import logging

from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.protocol import Failure, FailureReason, TaskPhase, TaskReport
from mlora_worker.runtime.log_lines import fields_of

log = logging.getLogger(__name__)


def told(task: TaskRun) -> tuple[TaskReport, bool]:
    """The report of ``task``, and whether it had to fail for it: its numbers may be such that no report can hold them."""
    try:
        return task.report(), False
    except Exception as error:  # whatever it is, it is about this task
        failed_before = task.phase is TaskPhase.FAILED
        if not failed_before:
            log.exception("the progress of %s cannot be reported", task.name, extra=fields_of(task.plan))
            task.fail(
                FailureReason.INTERNAL_ERROR,
                f"the progress of the task cannot be reported ({type(error).__name__}: {error}); a checkpoint or an "
                f"adapter below its output may contain invalid numbers. Remove them, or choose another output.uri",
            )
        return _bare(task), not failed_before


def _bare(task: TaskRun) -> TaskReport:
    """That it failed, and why; none of its numbers."""
    failure = task.failure or Failure(reason=FailureReason.INTERNAL_ERROR, message="it cannot be reported")
    return TaskReport(uid=task.uid, phase=TaskPhase.FAILED, failure=failure)
