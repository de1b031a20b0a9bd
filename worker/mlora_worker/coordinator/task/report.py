"""What a report says of each task. One report is of all of them: what cannot be told of one is its own failure alone."""

from __future__ import annotations

import logging
import math

from mlora_worker.bounds import is_within
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.protocol import DataCounts, Failure, FailureReason, TaskPhase, TaskReport
from mlora_worker.runtime.log_lines import fields_of

log = logging.getLogger(__name__)


def safe_report(task: TaskRun) -> tuple[TaskReport, bool]:
    """The report of ``task``, and whether it had to fail for it: its numbers may be such that no report can hold them."""
    try:
        return report_of(task), False
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


def report_of(task: TaskRun) -> TaskReport:
    """Made anew where something in it has changed: of thousands of tasks that wait, making all took tens of milliseconds
    under the lock."""
    last, evaluated, checkpoint = task.progress.last, task.progress.evaluated, task.checkpoint
    facts: dict[str, object] = {
        "uid": task.uid,
        "phase": task.phase,
        "step": task.progress.step,
        "total_steps": task.total_steps,
        "loss": last.loss if last else None,
        "evaluation": evaluated.last,
        "best": evaluated.best,
        "preference": last.preference if last else None,
        "tokens_per_second": _rate(task),
        "data": _counts(task),
        "adapter": task.adapter,
        "failure": task.failure,
        "checkpoint_step": checkpoint.stored_step or None,
        "resumed_step": checkpoint.resumed_step,
        "blocked": task.blocked,
        "crowded_out": (task.eviction is not None and not task.in_stream) or None,
        "released": _is_released(task) or None,
    }
    if task.reported is None or task.reported[0] != facts:
        task.reported = facts, TaskReport.model_validate(facts)
    return task.reported[1]


def _counts(task: TaskRun) -> DataCounts | None:
    if task.prepared is None:
        return task.finished_adapter.data if task.finished_adapter else None
    return task.prepared.counts


def _rate(task: TaskRun) -> float | None:
    """Tokens a second; None where there is no such number."""
    done = task.progress
    rate = done.tokens / done.seconds if done.seconds > 0 else math.inf
    return rate if is_within(rate) else None


def _is_released(task: TaskRun) -> bool:
    under_way = task.phase in (TaskPhase.TRAINING, TaskPhase.SAVING)
    return under_way and task.blocked is not None and not task.in_stream


def _bare(task: TaskRun) -> TaskReport:
    """That it failed, and why; none of its numbers."""
    failure = task.failure or Failure(reason=FailureReason.INTERNAL_ERROR, message="it cannot be reported")
    return TaskReport(uid=task.uid, phase=TaskPhase.FAILED, failure=failure)
