"""How many workers a pipeline shall have, and which of them must go. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from mlora_operator.api.meta import timestamp
from mlora_operator.api.units import parse_duration
from mlora_operator.reconcile.admission.pipeline_view import PipelineView
from mlora_operator.reconcile.state.decision import DesiredWorkers
from mlora_operator.reconcile.state.decode import not_ahead, parse_time
from mlora_operator.reconcile.state.snapshot import Pod, Task
from mlora_operator.reconcile.workers.gang import GangTurn
from mlora_operator.reconcile.workers.health import GroupHealth
from mlora_operator.scheduling.admission import Admission, AdmissionOutcome

_HOPELESS = (AdmissionOutcome.NEVER_FITS, AdmissionOutcome.REFUSED)


@dataclass(frozen=True, slots=True)
class GroupSize:
    replicas: int
    idle_since: str | None


def wanted_by(view: PipelineView, admissions: Mapping[str, Admission]) -> tuple[Task, ...]:
    """The tasks for which the workers run: not those that can never fit memory or model, nor the suspended once they
    are out. One whose spec is not understood is here only because it trains.
    """
    return tuple(
        task
        for task in view.tasks
        if (task.spec is None or not task.spec.suspend or task.uid in view.active)
        and (task.uid not in admissions or admissions[task.uid].outcome not in _HOPELESS)
    )


def size(
    view: PipelineView, wanting: tuple[Task, ...], fares: GroupHealth, turn: GangTurn, now: datetime
) -> GroupSize:
    """All stages while a task wants them and they may have them, none after ``idleTimeout`` without one, or when another
    group needs what they hold, none once they are given up.

    Workers that are to be replaced keep their number until they are free.
    """
    spec, status = view.pipeline.spec, view.pipeline.status
    assert spec is not None
    present = view.group.replicas if view.group is not None else 0
    if fares.given_up is not None or (view.blocked is not None and not view.active):
        return GroupSize(0, status.idle_since)
    if turn.given_back:
        return GroupSize(0, None)
    if wanting:
        return GroupSize(present if view.draining else spec.stages, None)
    if present == 0:
        return GroupSize(0, status.idle_since)
    since = not_ahead(status.idle_since, now) or timestamp(now)
    over = turn.yields or now - parse_time(since) >= parse_duration(spec.idle_timeout)
    return GroupSize(0 if over else present, since)


def workers(view: PipelineView, size: GroupSize) -> DesiredWorkers | None:
    """The group to apply, or None to leave everything as it is: nothing there and nothing wanted, or in use
    with a former configuration."""
    if view.group is not None and view.group.former:
        return None  # what is applied now would be taken for the former one's, and go with it
    nothing = view.group is None or view.group.gone
    if view.draining or (nothing and size.replicas == 0):
        return None
    return DesiredWorkers(view.pipeline, size.replicas)


def pods_to_delete(view: PipelineView, fares: GroupHealth) -> tuple[Pod, ...]:
    """All workers of a group that stands still, so that it meets anew under another run id. Else the workers of a former
    configuration, once the group itself has the new one: it never replaces them by itself (``updateStrategy: OnDelete``),
    not even those that cannot start.
    """
    if fares.stalled is not None and fares.given_up is None and view.group is not None:
        return tuple(pod for pod in view.group.pods if not pod.deleting)
    if view.group is None or view.revision is None or view.group.revision != view.revision or view.draining:
        return ()
    return tuple(pod for pod in view.group.pods if pod.revision != view.revision and not pod.deleting)
