"""How long a decision stays the same while nothing happens but that tasks train on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from mlora_operator.scheduling.admission import Admission, AdmissionOutcome
from mlora_operator.scheduling.entrant import Entrant, EntrantState

FOR_EVER, NO_TIME = timedelta.max, timedelta()


def holds_for(
    entrants: Iterable[Entrant], admissions: Mapping[str, Admission], now: datetime, hold_back: timedelta
) -> timedelta:
    """How long after ``now`` ``schedule`` would say the same of the same tasks, of whom those inside have done further
    steps, with the same memory and a policy that is ``steady``.

    1. No time, after a decision that lets somebody in or promises somebody room: it is to change something.
    2. Until somebody who waits, and may be passed till then, has waited for ``hold_back``.
    3. Steps alone change nothing: what they decide is who may pass one that is held back, for which there are only ever
       fewer rounds (``reservation``). Who had to stay behind stays there, and who did not fit does not fit later.
    """
    least = FOR_EVER
    for one in entrants:
        if one.state is not EntrantState.WAITING:
            continue
        admission = admissions[one.task.uid]
        if admission.outcome is AdmissionOutcome.ADMITTED or admission.after is not None or admission.lingers:
            return NO_TIME
        if admission.outcome is AdmissionOutcome.WAITING and admission.behind is None:
            left = hold_back - (now - one.since)
            if NO_TIME < left < least:
                least = left
    return least
