"""What of a pipeline the statuses of its tasks depend on, in words. Pure.

It is worked out once for all tasks. As long as it is the same, and a task and what is said of that are the same, so is the
task's status (``incremental``): so nothing else of a pipeline may be read there.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from mlora_operator.api.meta import timestamp
from mlora_operator.reconcile.admission.pipeline_view import PipelineView
from mlora_operator.reconcile.workers.gang import GangTurn, given_back_message
from mlora_operator.reconcile.workers.health import GroupHealth

# A coordinator that does not answer for less than this is not worth a word.
GRACE = timedelta(seconds=15)
# A kubelet needs a moment to say that a pod is gone.
GONE_WITHIN = timedelta(seconds=60)


class PipelineContext(NamedTuple):
    pipeline: str  # namespace/name
    run: str | None  # of the coordinator; None while none answers
    loading: bool  # it answers, but its stages still load the model
    stale: bool  # the workers have a former configuration
    in_use: bool
    placed: bool  # some worker has a node
    updates: str  # when workers with a former configuration are replaced
    starts: str  # what a pipeline that is not ready waits for
    silent: str | None  # that the coordinator has not answered for long, and why
    given_up: str | None  # why it is not started again
    given_back: str | None  # why it has no workers for now


def pipeline_context(
    view: PipelineView, fares: GroupHealth, turn: GangTurn, now: datetime
) -> PipelineContext:
    """Of the pipeline that accepts the tasks."""
    name, report, lost = str(view.pipeline.key), view.report, view.contact.lost_since
    silent = given_up = given_back = None
    if lost is not None and now - lost >= GRACE:
        cause = view.pod_problem.message if view.pod_problem is not None else view.contact.error
        silent = f"the coordinator of {name} does not respond: {cause}"
    if fares.given_up is not None:
        given_up = f"{name} stays down: {fares.given_up.message}"
    if turn.given_back and turn.record is not None:
        given_back = f"{name} waits: {given_back_message(view, turn.record)}"
    return PipelineContext(
        pipeline=name,
        run=report.run_id if report is not None else None,
        loading=view.contact.starting,
        stale=view.stale,
        in_use=view.in_use,
        placed=view.group is not None and any(pod.placed for pod in view.group.pods),
        updates=updating_message(view),
        starts=starting_message(view, now),
        silent=silent,
        given_up=given_up,
        given_back=given_back,
    )


def updating_message(view: PipelineView) -> str:
    assert view.pipeline.spec is not None
    if view.rolls or not view.in_use:
        return f"{view.pipeline.key} restarts with its new spec"
    patience = view.pipeline.spec.scheduling.hold_back
    return (
        f"{view.pipeline.key} restarts with its new spec once its tasks have finished, or after {patience} if they "
        f"can resume from checkpoints"
    )


def starting_message(view: PipelineView, now: datetime) -> str:
    """What a pipeline that is not ready yet is waiting for, in one sentence."""
    assert view.pipeline.spec is not None
    name, stages = view.pipeline.key, view.pipeline.spec.stages
    if view.blocked is not None:
        return f"{name} cannot start: {view.blocked.message}"
    if view.pod_problem is not None:
        return f"{name} cannot start: {view.pod_problem.message}"
    stuck = never_gone(view, now)
    if stuck is not None:
        return f"{name} cannot start: {stuck}"
    ready = view.group.ready if view.group is not None else 0
    if ready < stages:
        return f"{name} is starting: {ready} of {stages} workers are ready"
    if view.contact.starting or (view.report is not None and not view.report.ready):
        return f"{name} is starting: its workers load the model"
    if view.report is None:
        return f"{name} is starting: its coordinator does not respond yet"
    if view.odd_stages is not None:
        return f"{name} cannot train: {view.odd_stages}"
    return f"the task is being sent to {name}"


def never_gone(view: PipelineView, now: datetime) -> str | None:
    """The pod that a lost node keeps, if there is one: nobody may replace it before it is known to be off."""
    pods = view.group.pods if view.group is not None else ()
    late = [pod for pod in pods if pod.gone_by is not None and now - pod.gone_by >= GONE_WITHIN]
    if not late:
        return None
    return (
        f"pod {late[0].key.name} should have terminated by {timestamp(late[0].gone_by or now)}, but its node does "
        f"not respond: bring the node back, or, once it is shut down, delete it or taint it with "
        f"node.kubernetes.io/out-of-service"
    )
