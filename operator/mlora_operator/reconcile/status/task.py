"""The status of one task, from what became of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from mlora_operator.api import conditions as c
from mlora_operator.api.meta import timestamp
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.snapshot import Task, condition, is_true
from mlora_operator.reconcile.status.admission_message import AdmissionMessage
from mlora_operator.reconcile.status.conditions import DesiredCondition, conclude
from mlora_operator.reconcile.status.interruptions import for_whom, is_running, preempted, upload_blocked
from mlora_operator.reconcile.status.lifetime import is_out
from mlora_operator.reconcile.status.pipeline_summary import PipelineContext
from mlora_operator.reconcile.status.remaining import eta
from mlora_operator.reconcile.status.task_progress import figures
from mlora_operator.scheduling.admission import AdmissionOutcome
from mlora_worker.protocol import Failure, FailureReason, TaskPhase, TaskReport

# States of tasks that are not accepted yet, and will be without anybody's doing.
_BY_ITSELF = {
    c.REASON_CREATING_PIPELINE: "Pending",
    c.REASON_READ_ERROR: "Pending",
    c.REASON_NAMESPACE_LIMIT_REACHED: "Queued",
}


@dataclass(frozen=True, slots=True)
class StatusOutline:
    """Where a task stands: a word for `kubectl get` and the conditions behind it."""

    state: str
    reason: str
    desired: tuple[DesiredCondition, ...]


# What may be cured outside of the spec, which cannot be changed: a store, its rows, the room on a stage or a disk.
_CURABLE = frozenset(
    {
        FailureReason.DATASET_NOT_FOUND, FailureReason.ACCESS_DENIED, FailureReason.STORAGE_UNREACHABLE,
        FailureReason.INVALID_ROW, FailureReason.NO_TRAINABLE_ROWS, FailureReason.NO_TRAINABLE_TOKENS,
        FailureReason.UPLOAD_FAILED, FailureReason.INSUFFICIENT_SPACE, FailureReason.OUT_OF_MEMORY,
        FailureReason.OUTPUT_EXISTS,
        FailureReason.CHECKPOINT_MISMATCH, FailureReason.INTERNAL_ERROR,
    }
)  # fmt: skip
_TRY_AGAIN = (
    "; after you have fixed this, set the annotation mlora.dev/retry to a new value to run the task again"
)


def task_status(
    task: Task,
    accepting: Cause,
    context: PipelineContext | None,
    admission: AdmissionMessage | None,
    reported: TaskReport | None,
    late: str | None,
    now: datetime,
) -> TaskStatus:
    """The whole status of an unfinished task; the very object that it has where nothing changes.

    ``accepting``: why it is accepted, or is not. ``context``: of the accepting pipeline. ``reported``: what its coordinator
    says now. ``late``: why the task has to end (``overdue``). ``now`` is only when what changes changes: nothing else may
    follow from it, see ``incremental``.
    """
    if context is None:
        if late is None:
            outline = _not_accepted(task, accepting)
            return _status(task, outline, now, {"pipeline": None, "run": None, "eta": None})
        outline = _failed(Cause(c.REASON_DEADLINE_EXCEEDED, late), "its deadline has expired")
        refused = DesiredCondition(c.ACCEPTED, "False", *accepting)
        outline = replace(outline, desired=(refused, *outline.desired))
        nowhere = {"pipeline": None, "run": None, "eta": None, "completion_time": timestamp(now)}
        return _status(task, outline, now, nowhere)
    accepted = DesiredCondition(c.ACCEPTED, "True", *accepting)
    again = _was_restarted(task, context, reported)
    outline = _outline(task, context, reported, admission, late, again)
    beside = (
        *preempted(task, reported, admission, outline.desired),
        *upload_blocked(task, reported, outline.desired),
    )
    outline = _summarised(StatusOutline(outline.state, outline.reason, (accepted, *outline.desired, *beside)))
    begun = {wanted.type for wanted in outline.desired if wanted.status == "True"}
    changes: dict[str, Any] = {"pipeline": context.pipeline, **figures(task, reported, context.pipeline)}
    if again:
        changes |= {"restarts": (task.status.restarts or 0) + 1, "run": None}
    if c.PREEMPTED in begun and not is_true(task.status.conditions, c.PREEMPTED):
        changes["preemptions"] = (task.status.preemptions or 0) + 1
    if context.run is not None and c.RUNNING in begun:
        changes["run"] = context.run
    if begun & {c.ADMITTED, c.SUCCEEDED}:
        changes["start_time"] = task.status.start_time or timestamp(now)
    if begun & {c.SUCCEEDED, c.FAILED}:
        changes |= {"completion_time": timestamp(now), "run": None}
    if _is_out(task, reported):
        changes["run"] = None
    changes["eta"] = eta(task, reported) if outline.state == "Training" else None
    return _status(task, outline, now, changes)


def _outline(
    task: Task,
    context: PipelineContext,
    reported: TaskReport | None,
    admission: AdmissionMessage | None,
    late: str | None,
    again: bool,
) -> StatusOutline:
    if reported is not None and reported.phase is TaskPhase.SUCCEEDED:
        return _succeeded(task)
    if reported is not None and reported.phase is TaskPhase.FAILED:
        return _failed_by(reported.failure, "the task has failed")
    assert task.spec is not None
    outcome = admission.outcome if admission is not None else None
    if admission is not None and outcome is AdmissionOutcome.REFUSED:
        return _failed_by(admission.failure, "the task does not match the base model")
    if reported is not None and reported.phase is TaskPhase.SAVING:
        if reported.waits_for_store:
            return _only_uploads()
        return _runs(
            context, "Saving", Cause(c.REASON_SAVING, "the adapter is being gathered, verified and uploaded")
        )
    if late is not None:
        return _ends_late(task, context, reported, late)
    if task.spec.suspend:
        return _waits(task, "Suspended", Cause(c.REASON_SUSPENDED, "spec.suspend is true"), again)
    if context.given_up is not None:
        return _waits(
            task, "Pending", Cause(c.REASON_PIPELINE_FAILED, context.given_up), again or is_running(task)
        )
    if context.given_back is not None and outcome is not AdmissionOutcome.NEVER_FITS:
        cause = Cause(c.REASON_WAITING_FOR_WORKERS, context.given_back)
        return _waits(task, "Queued", cause, again or is_running(task))
    if context.loading and is_running(task):
        return _waits(task, "Pending", Cause(c.REASON_PIPELINE_STARTING, context.starts), again=True)
    if context.run is None and is_running(task):
        return _out_of_sight(task, context)
    if reported is not None and _is_trained(reported):
        if admission is not None and outcome is AdmissionOutcome.PREEMPTED:
            return _leaves(task, admission)
        return _runs(
            context, "Training", Cause(c.REASON_TRAINING, f"the task is training in {context.pipeline}")
        )
    if admission is not None and outcome in (AdmissionOutcome.NEVER_FITS, AdmissionOutcome.NOT_UNDERSTOOD):
        return _waits(task, "Rejected", admission.cause, again)
    if admission is not None and outcome in (AdmissionOutcome.NOT_IN_PLAN, AdmissionOutcome.NOT_SENT):
        return _waits(task, "Queued", admission.cause, again)
    if reported is not None and reported.phase is TaskPhase.PREPARING and reported.blocked is not None:
        return _waits(task, "Preparing", Cause(c.REASON_WAITING_FOR_STORE, reported.blocked.message), again)
    if reported is not None and reported.phase is TaskPhase.PREPARING:
        return _waits(
            task,
            "Preparing",
            Cause(c.REASON_PREPARING_DATA, "its rows are being fetched and tokenised"),
            again,
        )
    if reported is not None and outcome is AdmissionOutcome.ADMITTED:
        return _admitted(task, context, again)
    if context.stale and (context.in_use or reported is not None):
        return _waits(task, "Queued", Cause(c.REASON_PIPELINE_UPDATING, context.updates), again)
    if reported is not None and reported.blocked is not None and admission is None:
        return _waits(task, "Queued", Cause(c.REASON_WAITING_FOR_STORE, reported.blocked.message), again)
    if reported is not None and admission is not None:
        return _waits(task, "Queued", admission.cause, again)
    return _waits(task, "Pending", Cause(c.REASON_PIPELINE_STARTING, context.starts), again)


def _not_accepted(task: Task, cause: Cause) -> StatusOutline:
    """A task that was accepted before loses its place with it."""
    desired = [DesiredCondition(c.ACCEPTED, "False", *cause)]
    desired += [
        DesiredCondition(type_, "False", *cause)
        for type_ in (c.ADMITTED, c.RUNNING, c.PREEMPTED, c.UPLOAD_BLOCKED)
        if condition(task.status.conditions, type_) is not None
    ]
    state = _BY_ITSELF.get(cause.reason, "Rejected")
    return StatusOutline(state, cause.reason, tuple(desired))


def _waits(task: Task, state: str, cause: Cause, again: bool) -> StatusOutline:
    wanted = DesiredCondition(c.ADMITTED, "False", *cause)
    return StatusOutline(state, cause.reason, (wanted, *_not_running(task, cause, again)))


def _admitted(task: Task, context: PipelineContext, again: bool) -> StatusOutline:
    message = f"the task is admitted to {context.pipeline}"
    wanted = DesiredCondition(c.ADMITTED, "True", c.REASON_ADMITTED, message)
    not_running = _not_running(task, Cause(c.REASON_ADMITTED, "training is about to begin"), again)
    return StatusOutline("Queued", c.REASON_ADMITTED, (wanted, *not_running))


def _not_running(task: Task, cause: Cause, again: bool) -> tuple[DesiredCondition, ...]:
    """Running is spoken of once a task has run; after a restart it says so until the task runs again."""
    before = condition(task.status.conditions, c.RUNNING)
    if again or (
        before is not None and before.reason == c.REASON_RESTARTING and cause.reason != c.REASON_SUSPENDED
    ):
        told = "the worker group was restarted; the task runs again as soon as it is admitted"
        return (DesiredCondition(c.RUNNING, "False", c.REASON_RESTARTING, told),)
    if before is None:
        return ()
    return (DesiredCondition(c.RUNNING, "False", *cause),)


def _runs(context: PipelineContext, state: str, cause: Cause) -> StatusOutline:
    admitted = DesiredCondition(
        c.ADMITTED, "True", c.REASON_ADMITTED, f"the task is admitted to {context.pipeline}"
    )
    return StatusOutline(state, cause.reason, (admitted, DesiredCondition(c.RUNNING, "True", *cause)))


def _is_trained(reported: TaskReport) -> bool:
    """It is in training and a stage holds it, as far as is known."""
    return reported.phase is TaskPhase.TRAINING and not reported.crowded_out and not reported.waits_for_store


def _only_uploads() -> StatusOutline:
    given_back = DesiredCondition(
        c.ADMITTED, "False", c.REASON_FINISHED, "the task released its pipeline memory; its upload is pending"
    )
    return StatusOutline(
        "Saving",
        c.REASON_SAVING,
        (given_back, DesiredCondition(c.RUNNING, "True", c.REASON_SAVING, "the adapter is being uploaded")),
    )


def _leaves(task: Task, admission: AdmissionMessage) -> StatusOutline:
    """It trains to the end of its step and writes its checkpoint; its memory is its own until then."""
    message = for_whom(task, admission)
    desired = (
        DesiredCondition(c.ADMITTED, "False", c.REASON_PREEMPTED, message),
        DesiredCondition(
            c.RUNNING,
            "True",
            c.REASON_TRAINING,
            "the task finishes its step and writes its checkpoint",
        ),
    )
    return StatusOutline("Training", c.REASON_PREEMPTED, desired)


def _summarised(outline: StatusOutline) -> StatusOutline:
    """The most telling condition makes the word for `kubectl get`: what keeps a task from going on. One that trains on
    while its checkpoint is refused is not kept from anything.
    """
    true = {wanted.type: wanted for wanted in outline.desired if wanted.status == "True"}
    if c.UPLOAD_BLOCKED in true and outline.state == "Saving":
        return replace(outline, state="UploadBlocked", reason=true[c.UPLOAD_BLOCKED].reason)
    if c.PREEMPTED in true and outline.state == "Queued" and c.ADMITTED not in true:
        return replace(outline, state="Preempted", reason=true[c.PREEMPTED].reason)
    running = next((wanted.reason for wanted in outline.desired if wanted.type == c.RUNNING), None)
    if running == c.REASON_RESTARTING and outline.reason == c.REASON_PIPELINE_STARTING:
        return replace(outline, reason=c.REASON_RESTARTING)
    return outline


def _is_out(task: Task, reported: TaskReport | None) -> bool:
    """It left the group in order, so the group's end is no restart of this task."""
    suspended = task.spec is not None and task.spec.suspend
    return suspended or (reported is not None and reported.phase is TaskPhase.PREEMPTED)


def _out_of_sight(task: Task, context: PipelineContext) -> StatusOutline:
    """The coordinator does not answer: the task may well train on. After a while that is said."""
    held = [condition(task.status.conditions, type_) for type_ in (c.ADMITTED, c.RUNNING)]
    desired = tuple(
        DesiredCondition(one.type, one.status, one.reason, one.message) for one in held if one is not None
    )
    if context.silent is not None:
        desired = (
            *desired[:-1],
            DesiredCondition(c.RUNNING, "Unknown", c.REASON_UNREACHABLE, context.silent),
        )
    return StatusOutline(task.status.state or "Training", desired[-1].reason, desired)


def _succeeded(task: Task) -> StatusOutline:
    where = task.spec.output.uri if task.spec is not None else "its output"
    told = f"the adapter was verified and uploaded to {where}"
    return StatusOutline(
        "Succeeded",
        c.REASON_ADAPTER_UPLOADED,
        (
            DesiredCondition(c.ADMITTED, "False", c.REASON_FINISHED, "the task released its pipeline memory"),
            DesiredCondition(c.RUNNING, "False", c.REASON_FINISHED, "all steps are complete"),
            DesiredCondition(c.SUCCEEDED, "True", c.REASON_ADAPTER_UPLOADED, told),
            DesiredCondition(c.FAILED, "False", c.REASON_ADAPTER_UPLOADED),
            DesiredCondition(c.FINISHED, "True", c.REASON_SUCCEEDED, told),
        ),
    )


def _ends_late(task: Task, context: PipelineContext, reported: TaskReport | None, late: str) -> StatusOutline:
    """It fails once it is out of the pipeline. While the coordinator does not answer, it may train on: it is not called
    failed before it is known to have left, or its workers are known to be gone, as those are that were given back or
    have no node.
    """
    unknown = context.run is None and context.given_up is None and not context.loading
    if unknown and context.placed and is_running(task):
        return _out_of_sight(task, context)
    if is_out(reported):
        return _failed(Cause(c.REASON_DEADLINE_EXCEEDED, late), "its deadline has expired")
    desired = (
        DesiredCondition(c.ADMITTED, "False", c.REASON_DEADLINE_EXCEEDED, late),
        DesiredCondition(
            c.RUNNING,
            "True",
            c.REASON_TRAINING,
            "the task finishes its step and writes its checkpoint",
        ),
    )
    return StatusOutline("Training", c.REASON_DEADLINE_EXCEEDED, desired)


def _failed_by(failure: Failure | None, told: str) -> StatusOutline:
    if failure is None:
        return _failed(Cause("InternalError", f"the worker reported no reason{_TRY_AGAIN}"), told)
    hint = _TRY_AGAIN if failure.reason in _CURABLE else ""
    return _failed(Cause(failure.reason.value, failure.message + hint), told)


def _failed(cause: Cause, told: str) -> StatusOutline:
    return StatusOutline(
        "Failed",
        cause.reason,
        (
            DesiredCondition(c.ADMITTED, "False", c.REASON_FINISHED, "the task released its pipeline memory"),
            DesiredCondition(c.RUNNING, "False", c.REASON_FINISHED, told),
            DesiredCondition(c.SUCCEEDED, "False", *cause),
            DesiredCondition(c.FAILED, "True", *cause),
            DesiredCondition(c.FINISHED, "True", c.REASON_FAILED, f"{cause.reason}: {cause.message}"),
        ),
    )


def _status(task: Task, outline: StatusOutline, now: datetime, changes: dict[str, Any]) -> TaskStatus:
    held = task.status
    changes = {
        "conditions": conclude(held.conditions, outline.desired, task.generation, now),
        "observed_generation": task.generation,
        "retry": task.retry if task.retry is not None else held.retry,
        "state": outline.state,
        "reason": outline.reason,
        **changes,
    }
    if all(getattr(held, name) == value for name, value in changes.items()):
        return held
    return held.model_copy(update=changes)


def _was_restarted(task: Task, context: PipelineContext, reported: TaskReport | None) -> bool:
    """The task ran in another run of the worker group than the one that speaks now.

    A phase never goes back within one run, so the run's identity is the whole evidence; it is kept in the
    task's status, and a restarted operator sees the same.
    """
    if context.run is None or task.status.run is None or task.status.run == context.run:
        return False
    return reported is None or reported.phase is not TaskPhase.SUCCEEDED
