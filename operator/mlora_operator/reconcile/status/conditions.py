"""Conditions from desired, and the events that their changes are worth. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from mlora_operator.api import conditions as c
from mlora_operator.api.meta import Condition, timestamp
from mlora_operator.reconcile.state.decision import Event
from mlora_operator.reconcile.state.snapshot import Key, condition

Truth = Literal["True", "False", "Unknown"]
MESSAGE_LIMIT = 4096  # of a condition in the schema


@dataclass(frozen=True, slots=True)
class DesiredCondition:
    """A condition as it shall be, without its times."""

    type: str
    status: Truth
    reason: str
    message: str = ""


def conclude(
    held: Sequence[Condition], desired: Iterable[DesiredCondition], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The desired as conditions; ``lastTransitionTime`` is kept where ``status`` stays the same."""
    known = tuple(held)
    return tuple([_condition(known, wanted, generation, now) for wanted in desired])


def _condition(
    held: tuple[Condition, ...], wanted: DesiredCondition, generation: int, now: datetime
) -> Condition:
    before = condition(held, wanted.type)
    message = wanted.message[:MESSAGE_LIMIT]
    stays = before is not None and before.status == wanted.status
    if (
        before is not None
        and stays
        and (before.reason, before.message, before.observed_generation)
        == (wanted.reason, message, generation)
    ):
        return before  # the same object: what follows sees at a glance that nothing has changed
    return Condition(
        type=wanted.type,
        status=wanted.status,
        reason=wanted.reason,
        message=message,
        observed_generation=generation,
        last_transition_time=before.last_transition_time if before is not None and stays else timestamp(now),
    )


# The words of a task's `status.state`. An unfinished task may go from any to any other of them, since each follows from
# what is at that moment; of the final ones, a failed task is unfinished again when its user asks for another try.
UNFINISHED = frozenset(
    {
        "Pending",
        "Rejected",
        "Preparing",
        "Queued",
        "Training",
        "Preempted",
        "Saving",
        "UploadBlocked",
        "Suspended",
    }
)
FINAL = frozenset({"Succeeded", "Failed"})


# (type, status) or (type, status, reason) of a condition that is news when it comes about.
NEWS: dict[tuple[str, ...], Literal["Normal", "Warning"]] = {
    (c.ACCEPTED, "True"): "Normal",
    (c.ACCEPTED, "False"): "Warning",
    (c.ACCEPTED, "True", c.REASON_RECONCILE_ERROR): "Warning",
    (c.ACCEPTED, "Unknown"): "Warning",
    (c.ACCEPTED, "False", c.REASON_CREATING_PIPELINE): "Normal",
    (c.ADMITTED, "True"): "Normal",
    (c.ADMITTED, "False", c.REASON_EXCEEDS_CAPACITY): "Warning",
    (c.ADMITTED, "False", c.REASON_SUSPENDED): "Normal",
    (c.RUNNING, "True"): "Normal",
    (c.RUNNING, "False", c.REASON_RESTARTING): "Warning",
    (c.RUNNING, "Unknown"): "Warning",
    (c.PREEMPTED, "True"): "Normal",
    (c.PREEMPTED, "False", c.REASON_RESUMED): "Normal",
    (c.UPLOAD_BLOCKED, "True"): "Warning",
    (c.UPLOAD_BLOCKED, "False", c.REASON_UPLOAD_RESUMED): "Normal",
    (c.ADMITTED, "False", c.REASON_PIPELINE_FAILED): "Warning",
    (c.ADMITTED, "False", c.REASON_WAITING_FOR_WORKERS): "Warning",
    (c.SUCCEEDED, "True"): "Normal",
    (c.FAILED, "True"): "Warning",
    (c.READY, "True"): "Normal",
    (c.READY, "False", c.REASON_IDLE): "Normal",
    (c.READY, "False", c.REASON_STARTING): "Normal",
    (c.READY, "False", c.REASON_POD_NOT_STARTING): "Warning",
    (c.READY, "False", c.REASON_POD_STUCK_TERMINATING): "Warning",
    (c.READY, "False", c.REASON_WORKERS_INCOMPLETE): "Warning",
    (c.READY, "False", c.REASON_UNREACHABLE): "Warning",
    (c.READY, "False", c.REASON_STAGES_DIFFER): "Warning",
    (c.READY, "False", c.REASON_INVALID_SPEC): "Warning",
    (c.READY, "False", c.REASON_SECRET_NOT_FOUND): "Warning",
    (c.READY, "False", c.REASON_SECRET_INCOMPLETE): "Warning",
    (c.READY, "False", c.REASON_RESTART_LIMIT): "Warning",
    (c.READY, "False", c.REASON_CANNOT_SERVE): "Warning",
    (c.READY, "Unknown"): "Warning",
    (c.SERVES_OTHERS, "False"): "Warning",
    (c.SERVES_OTHERS, "True"): "Normal",
    (c.PLAN_REJECTED, "True"): "Warning",
    (c.PLAN_REJECTED, "False"): "Normal",
    (c.ADMITTED, "False", c.REASON_WORKERS_REJECT_TASK): "Warning",
    (c.CERTIFICATE_ENDS, "True"): "Warning",
    (c.CERTIFICATE_ENDS, "False"): "Normal",
    (c.STALLED, "True"): "Warning",
    (c.STALLED, "False"): "Normal",
}


def news(
    kind: Literal["LoRATask", "LoRAPipeline"],
    about: Key,
    uid: str,
    before: Sequence[Condition],
    after: Sequence[Condition],
) -> list[Event]:
    """An event for each condition whose status or reason changed, if that is news."""
    events = []
    for new in after:
        old = condition(tuple(before), new.type)
        if old is not None and (old.status, old.reason) == (new.status, new.reason):
            continue
        key = (new.type, new.status)
        kind_of_news = NEWS.get((*key, new.reason)) or NEWS.get(key)
        if kind_of_news is not None:
            events.append(Event(kind, about, uid, kind_of_news, new.reason, new.message))
    return events
