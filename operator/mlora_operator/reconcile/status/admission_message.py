"""What the scheduler says of a task, as its status has it: in words. Pure."""

from __future__ import annotations

from typing import NamedTuple

from mlora_operator.api import conditions as c
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.snapshot import Task
from mlora_operator.scheduling.admission import Outcome, Place
from mlora_operator.scheduling.words import must_leave, not_yet, too_large
from mlora_worker.protocol import Failure


class Seat(NamedTuple):
    """``cause``: of a task that waits, never fits or must leave. ``known``: it is known for whom that is."""

    outcome: Outcome
    cause: Cause = Cause("", "")
    failure: Failure | None = None
    known: bool = False


_ADMITTED, _SUSPENDED = Seat(Outcome.ADMITTED), Seat(Outcome.SUSPENDED)
_UNTOLD = Seat(
    Outcome.UNTOLD,
    Cause(
        c.REASON_PLAN_LIMIT_REACHED,
        "the specs of the tasks before it fill the plan of the workers (16 MiB): this task follows automatically once "
        "some of them have finished. To make specs smaller, move long dataset.inline and dataset.chatTemplate texts into "
        "a file or a ConfigMap",
    ),
)


def seat(task: Task, place: Place | None, *, words_stay: bool) -> Seat | None:
    """``words_stay``: one that waits in a queue, and was told so, keeps the words that it was told. They change with
    everybody who comes and goes before it, and it was told a moment ago."""
    if place is None:
        return None
    match place.outcome:
        case Outcome.ADMITTED:
            return _ADMITTED
        case Outcome.SUSPENDED:
            return _SUSPENDED
        case Outcome.WAITING:
            reason = (
                c.REASON_NAMESPACE_LIMIT_REACHED if place.limit is not None else c.REASON_WAITING_FOR_MEMORY
            )
            held = task.admitted
            if words_stay and held is not None and (held.status, held.reason) == ("False", reason):
                return Seat(place.outcome, Cause(reason, held.message))
            return Seat(place.outcome, Cause(reason, not_yet(place, task.key.namespace)))
        case Outcome.UNTOLD:
            return _UNTOLD
        case Outcome.NEVER_FITS:
            return Seat(place.outcome, Cause(c.REASON_EXCEEDS_CAPACITY, too_large(place)))
        case Outcome.PREEMPTED:
            cause = Cause(c.REASON_PREEMPTED, must_leave(place, task.key.namespace))
            return Seat(place.outcome, cause, known=place.displaced_by is not None)
        case Outcome.REFUSED:
            return Seat(place.outcome, failure=place.failure)
