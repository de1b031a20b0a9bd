"""What keeps a task from going on for a while: the conditions Preempted and UploadBlocked. Pure.

Both are spoken of once they have been True, so that an ordinary task has neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlora_operator.api import conditions as c
from mlora_operator.reconcile.state.snapshot import Task, condition
from mlora_operator.reconcile.status.admission_message import AdmissionMessage
from mlora_operator.reconcile.status.conditions import DesiredCondition
from mlora_worker.protocol import TaskPhase, TaskReport


def preempted(
    task: Task,
    reported: TaskReport | None,
    admission: AdmissionMessage | None,
    desired: Sequence[DesiredCondition],
) -> tuple[DesiredCondition, ...]:
    """Spoken of once a task was displaced, and True until it runs again or ends.

    The scheduler's word starts it. A task that the worker says is out, though it ran by its status, was displaced too: the
    word was lost with the operator that gave it.
    """
    suspended = task.spec is not None and task.spec.suspend
    held = condition(task.status.conditions, c.PREEMPTED)
    said = {wanted.type: wanted for wanted in desired}
    if c.ADMITTED in said and said[c.ADMITTED].reason == c.REASON_PREEMPTED and admission is not None:
        return (DesiredCondition(c.PREEMPTED, "True", c.REASON_PREEMPTED, for_whom(task, admission)),)
    crowded = reported is not None and reported.crowded_out
    out = crowded or (reported is not None and _is_out(reported))
    if out and not suspended and is_running(task) and (held is None or held.status != "True"):
        words = (
            "memory ran out because other tasks use it, or have not released it yet"
            if crowded
            else "a task that is ahead in the queue took its memory"
        )
        return (DesiredCondition(c.PREEMPTED, "True", c.REASON_PREEMPTED, words),)
    if held is None:
        return ()
    if held.status == "True" and said.keys() & {c.SUCCEEDED, c.FAILED}:
        return (DesiredCondition(c.PREEMPTED, "False", c.REASON_FINISHED),)
    if held.status == "True" and c.RUNNING in said and said[c.RUNNING].status == "True":
        return (DesiredCondition(c.PREEMPTED, "False", c.REASON_RESUMED, "the task runs again"),)
    return (DesiredCondition(held.type, held.status, held.reason, held.message),)


def upload_blocked(
    task: Task, reported: TaskReport | None, desired: Sequence[DesiredCondition]
) -> tuple[DesiredCondition, ...]:
    """Spoken of once the store has refused a checkpoint or the adapter; the worker tries again by itself. A task that waits
    for its first rows has nothing to store: its condition Admitted says for whom it waits."""
    held = condition(task.status.conditions, c.UPLOAD_BLOCKED)
    blocked = reported.blocked if reported is not None else None
    failed = any(wanted.type == c.FAILED and wanted.status == "True" for wanted in desired)
    stores = (
        bool(task.status.step)
        or held is not None
        or (reported is not None and reported.phase is not TaskPhase.PREPARING)
    )
    if reported is not None and blocked is not None and stores and not failed:
        kept = (
            "; the finished adapter is kept until the upload succeeds"
            if reported.phase is TaskPhase.SAVING
            else ""
        )
        return (DesiredCondition(c.UPLOAD_BLOCKED, "True", blocked.reason.value, blocked.message + kept),)
    if held is None:
        return ()
    if held.status == "True" and failed:
        return (DesiredCondition(c.UPLOAD_BLOCKED, "False", c.REASON_FINISHED),)
    if held.status == "True" and reported is not None:
        message = "the store accepts uploads again"
        return (DesiredCondition(c.UPLOAD_BLOCKED, "False", c.REASON_UPLOAD_RESUMED, message),)
    return (DesiredCondition(held.type, held.status, held.reason, held.message),)


def _is_out(reported: TaskReport) -> bool:
    """No stage holds it, though it is not done."""
    return reported.phase is TaskPhase.PREEMPTED or (
        reported.phase is TaskPhase.TRAINING and reported.waits_for_store
    )


def for_whom(task: Task, admission: AdmissionMessage) -> str:
    """For whom it leaves: the scheduler knows at the moment of its decision, the condition keeps it."""
    held = condition(task.status.conditions, c.PREEMPTED)
    if not admission.known and held is not None and held.status == "True":
        return held.message
    return admission.cause.message


def is_running(task: Task) -> bool:
    held = condition(task.status.conditions, c.RUNNING)
    return held is not None and held.status != "False"
