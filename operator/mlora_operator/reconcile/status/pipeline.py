"""The status of a pipeline. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

from mlora_operator.api import conditions as c
from mlora_operator.api.meta import NamespacesFrom, timestamp
from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.memory.learned import to_status
from mlora_operator.memory.origin import origin_of
from mlora_operator.reconcile.admission.capacity import memory_model
from mlora_operator.reconcile.admission.pipeline_view import PipelineView
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.decode import not_ahead
from mlora_operator.reconcile.state.snapshot import condition
from mlora_operator.reconcile.status.conditions import DesiredCondition, Truth, conclude
from mlora_operator.reconcile.status.pipeline_summary import GRACE, never_gone, starting_message
from mlora_operator.reconcile.workers.gang import GangTurn, given_back_message
from mlora_operator.reconcile.workers.health import GroupHealth
from mlora_operator.reconcile.workers.scale import GroupSize

CERTIFICATE_WARNING = timedelta(days=30)  # before its end


def pipeline_status(
    view: PipelineView,
    size: GroupSize,
    fares: GroupHealth,
    turn: GangTurn,
    rejected: tuple[DesiredCondition, ...],
    waiting: int,
    generation: int | None,
    now: datetime,
) -> PipelineStatus:
    """The whole status. ``rejected``: see ``plan_rejected``. ``waiting``: tasks that want the workers and do not train.
    ``generation``: of the plan.
    """
    state, desired = _conditions(view, size, fares, turn, now)
    desired += _stalled(view, fares) + _serves_others(view) + rejected + _certificate_ends(view, now)
    status, report = view.pipeline.status, view.present_report
    ready = view.group.ready if view.group is not None else 0
    changes: dict[str, object] = {
        "conditions": conclude(status.conditions, desired, view.pipeline.generation, now),
        "observed_generation": view.pipeline.generation,
        "state": state,
        "replicas": size.replicas,
        "members": view.members,
        "ready_replicas": ready,
        "ready": f"{ready}/{view.pipeline.spec.stages}" if view.pipeline.spec is not None else None,
        "update": "Pending" if view.stale else None,
        "start": turn.record,
        "active_tasks": len(view.active),
        "waiting_tasks": waiting,
        "idle_since": size.idle_since,
        "updating_since": _updating_since(view, waiting, now),
        "plan_generation": generation,
        "restarts": fares.restarts or None,
        "last_restart": fares.last_restart,
        "last_failure": fares.last_failure,
        "given_up": fares.given_up.reason if fares.given_up is not None else None,
        "workers_seen": fares.seen,
        "revision": view.revision,
    }
    if report is not None and report.facts is not None:
        changes |= {"facts": report.facts, "stages": report.stages}
        memory = memory_model(view)
        if memory is not None and view.pipeline.spec is not None:
            changes["memory"] = to_status(
                memory.learned, origin_of(view.pipeline.spec, memory.stages), view.image
            )
        if not view.active:  # while tasks train it moves with each step, which is no reason to write
            changes["wire"] = report.wire
    elif status.observed_generation != view.pipeline.generation:
        # It may be another model or another number of stages. What was learned of the memory says itself of what.
        changes |= {"facts": None, "stages": ()}
    return status.model_copy(update=changes)


def _updating_since(view: PipelineView, waiting: int, now: datetime) -> str | None:
    """No task is interrupted while nobody waits for its place."""
    if not view.stale or (view.draining and not waiting):
        return None
    held = not_ahead(view.pipeline.status.updating_since, now)
    return held or (timestamp(now) if view.draining else None)


def invalid_status(view: PipelineView, now: datetime) -> PipelineStatus:
    """Of a pipeline whose spec is wrong: its workers are left as they are."""
    problem = view.pipeline.problem or "spec is invalid"
    wanted = DesiredCondition(c.READY, "False", c.REASON_INVALID_SPEC, problem)
    held = view.pipeline.status
    return held.model_copy(
        update={
            "conditions": conclude(held.conditions, (wanted,), view.pipeline.generation, now),
            "observed_generation": view.pipeline.generation,
            "state": "Failed",
        }
    )


def _conditions(
    view: PipelineView, size: GroupSize, fares: GroupHealth, turn: GangTurn, now: datetime
) -> tuple[str, tuple[DesiredCondition, ...]]:
    if fares.given_up is not None:
        return "Failed", _both("False", fares.given_up)
    if view.blocked is not None and size.replicas == 0:
        return "Failed", _both("False", view.blocked)
    if turn.given_back and turn.record is not None:
        message = given_back_message(view, turn.record)
        return "Waiting", _both("False", Cause(c.REASON_WORKERS_INCOMPLETE, message))
    if size.replicas == 0:
        return "Idle", _both(
            "False", Cause(c.REASON_IDLE, "no task needs the workers; the next one starts them")
        )
    available = _available(view, size, now)
    if fares.stalled is not None:
        return "Stalled", (DesiredCondition(c.READY, "False", *fares.stalled), available)
    if view.odd_stages is not None:
        return "Starting", (
            DesiredCondition(c.READY, "False", c.REASON_STAGES_DIFFER, view.odd_stages),
            available,
        )
    if view.report is not None and view.report.ready:
        return "Ready", (
            DesiredCondition(c.READY, "True", c.REASON_READY, "all stages have loaded the model"),
            available,
        )
    if available.status == "False":
        return "Starting", (
            DesiredCondition(c.READY, "False", available.reason, available.message),
            available,
        )
    lost = view.contact.lost_since
    silent = view.report is None and not view.contact.starting
    if silent and lost is not None and now - lost >= GRACE:
        message = f"the workers are running, but their coordinator does not respond: {view.contact.error}"
        return "Starting", (DesiredCondition(c.READY, "False", c.REASON_UNREACHABLE, message), available)
    ready = condition(view.pipeline.status.conditions, c.READY)
    if silent and ready is not None and ready.status == "True":
        return "Ready", (DesiredCondition(c.READY, "True", ready.reason, ready.message), available)
    return "Starting", (
        DesiredCondition(c.READY, "False", c.REASON_STARTING, starting_message(view, now)),
        available,
    )


def _stalled(view: PipelineView, fares: GroupHealth) -> tuple[DesiredCondition, ...]:
    """Spoken of once it has been so, and until another group speaks."""
    if fares.stalled is not None:
        return (DesiredCondition(c.STALLED, "True", *fares.stalled),)
    held = condition(view.pipeline.status.conditions, c.STALLED)
    if held is None:
        return ()
    if held.status == "True" and (view.report is not None or fares.given_up is not None):
        return (DesiredCondition(c.STALLED, "False", c.REASON_RESTARTED, "the workers were restarted"),)
    return (DesiredCondition(held.type, held.status, held.reason, held.message),)


def _certificate_ends(view: PipelineView, now: datetime) -> tuple[DesiredCondition, ...]:
    """Spoken of once it is near, and until another one is read: after it, the workers are sent nothing any more."""
    held = condition(view.pipeline.status.conditions, c.CERTIFICATE_ENDS)
    end = view.certificate
    if end is None:
        return () if held is None else (DesiredCondition(held.type, held.status, held.reason, held.message),)
    if end.at - now < CERTIFICATE_WARNING:
        over = end.at <= now
        words = (
            f"the certificate in {end.origin} {'ended' if over else 'ends'} at {timestamp(end.at)}; after that, the "
            f"workers receive no plans. Renew it: replace your own certificate at its source, or delete the Secret, "
            f"and the operator creates a new one without a restart"
        )
        return (
            DesiredCondition(
                c.CERTIFICATE_ENDS, "True", c.REASON_ENDED if over else c.REASON_ENDS_SOON, words
            ),
        )
    if held is None:
        return ()
    words = f"the certificate in {end.origin} ends at {timestamp(end.at)}"
    return (DesiredCondition(c.CERTIFICATE_ENDS, "False", c.REASON_RENEWED, words),)


def _serves_others(view: PipelineView) -> tuple[DesiredCondition, ...]:
    """Spoken of once it has meant to without the right, and as long as it means to."""
    if view.claims_in_vain is not None:
        return (
            DesiredCondition(
                c.SERVES_OTHERS, "False", c.REASON_CROSS_NAMESPACE_NOT_ALLOWED, view.claims_in_vain
            ),
        )
    assert view.pipeline.spec is not None
    means_to = view.pipeline.spec.allowed_namespaces.from_ is not NamespacesFrom.SAME
    if not means_to or condition(view.pipeline.status.conditions, c.SERVES_OTHERS) is None:
        return ()
    return (
        DesiredCondition(
            c.SERVES_OTHERS,
            "True",
            c.REASON_CROSS_NAMESPACE_ALLOWED,
            "it may now serve tasks of other namespaces",
        ),
    )


def _available(view: PipelineView, size: GroupSize, now: datetime) -> DesiredCondition:
    stuck = never_gone(view, now)
    if stuck is not None:
        return DesiredCondition(c.WORKERS_AVAILABLE, "False", c.REASON_POD_STUCK_TERMINATING, stuck)
    if view.pod_problem is not None:
        return DesiredCondition(
            c.WORKERS_AVAILABLE, "False", c.REASON_POD_NOT_STARTING, view.pod_problem.message
        )
    ready = view.group.ready if view.group is not None else 0
    if ready < size.replicas:
        return DesiredCondition(
            c.WORKERS_AVAILABLE, "False", c.REASON_STARTING, f"{ready} of {size.replicas} workers are ready"
        )
    return DesiredCondition(
        c.WORKERS_AVAILABLE, "True", c.REASON_READY, f"{ready} of {size.replicas} workers are ready"
    )


def _both(truth: Truth, cause: Cause) -> tuple[DesiredCondition, ...]:
    return tuple(DesiredCondition(type_, truth, *cause) for type_ in (c.READY, c.WORKERS_AVAILABLE))
