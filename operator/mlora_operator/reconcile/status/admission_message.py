"""What the scheduler says of a task, as its status has it: in words. Pure."""

from __future__ import annotations

from typing import NamedTuple

from mlora_operator.api import conditions as c
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.snapshot import Task
from mlora_operator.scheduling.admission import Admission, AdmissionOutcome
from mlora_operator.scheduling.words import must_leave, not_yet, too_large
from mlora_worker.protocol import Failure


class AdmissionMessage(NamedTuple):
    """``cause``: of a task that waits, never fits or must leave. ``known``: it is known for whom that is."""

    outcome: AdmissionOutcome
    cause: Cause = Cause("", "")
    failure: Failure | None = None
    known: bool = False


_ADMITTED = AdmissionMessage(AdmissionOutcome.ADMITTED)
_SUSPENDED = AdmissionMessage(AdmissionOutcome.SUSPENDED)
_NOT_IN_PLAN = AdmissionMessage(
    AdmissionOutcome.NOT_IN_PLAN,
    Cause(
        c.REASON_PLAN_LIMIT_REACHED,
        "the specs of the tasks before it fill the plan of the workers (16 MiB): this task follows automatically once "
        "some of them have finished. To make specs smaller, move long dataset.inline and dataset.chatTemplate texts into "
        "a file or a ConfigMap",
    ),
)
_NOT_SENT = AdmissionMessage(
    AdmissionOutcome.NOT_SENT,
    Cause(
        c.REASON_WORKERS_REJECT_PLAN,
        "the workers of its pipeline reject all that the operator sends them: ask the platform team, the pipeline's "
        "condition PlanRejected has the cause; this task follows automatically",
    ),
)


def admission_message(
    task: Task, admission: Admission | None, *, words_stay: bool
) -> AdmissionMessage | None:
    """``words_stay``: one that waits in a queue, and was told so, keeps the words that it was told. They change with
    everybody who comes and goes before it, and it was told a moment ago."""
    if admission is None:
        return None
    match admission.outcome:
        case AdmissionOutcome.ADMITTED:
            return _ADMITTED
        case AdmissionOutcome.SUSPENDED:
            return _SUSPENDED
        case AdmissionOutcome.WAITING:
            reason = (
                c.REASON_NAMESPACE_LIMIT_REACHED
                if admission.limit is not None
                else c.REASON_WAITING_FOR_MEMORY
            )
            held = task.admitted
            if words_stay and held is not None and (held.status, held.reason) == ("False", reason):
                return AdmissionMessage(admission.outcome, Cause(reason, held.message))
            return AdmissionMessage(admission.outcome, Cause(reason, not_yet(admission, task.key.namespace)))
        case AdmissionOutcome.NOT_IN_PLAN:
            return _NOT_IN_PLAN
        case AdmissionOutcome.NOT_SENT:
            return _NOT_SENT
        case AdmissionOutcome.NOT_UNDERSTOOD:
            told = (
                f"the workers of its pipeline reject a field of this task: {admission.words}. They are of another version "
                f"than the operator: leave the field out in a new task, or ask the platform team for workers of its version"
            )
            return AdmissionMessage(admission.outcome, Cause(c.REASON_WORKERS_REJECT_TASK, told))
        case AdmissionOutcome.NEVER_FITS:
            return AdmissionMessage(admission.outcome, Cause(c.REASON_EXCEEDS_CAPACITY, too_large(admission)))
        case AdmissionOutcome.PREEMPTED:
            cause = Cause(c.REASON_PREEMPTED, must_leave(admission, task.key.namespace))
            return AdmissionMessage(admission.outcome, cause, known=admission.displaced_by is not None)
        case AdmissionOutcome.REFUSED:
            return AdmissionMessage(admission.outcome, failure=admission.failure)
