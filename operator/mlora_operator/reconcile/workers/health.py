"""How a worker group fares: its failures are counted, a group that stands still is found, one that fails again and again
is given up. Pure; all it remembers is in the pipeline's status.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from mlora_operator.api import conditions as c
from mlora_operator.api.meta import timestamp
from mlora_operator.api.pipeline_status import WorkersSeen
from mlora_operator.api.units import parse_duration
from mlora_operator.reconcile.admission.pipeline_view import PipelineView
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.decode import not_ahead, parse_time
from mlora_operator.reconcile.state.snapshot import Pod, ProcessEnding, WorkerGroup, is_true

WORDS_LIMIT = 1024  # characters of a failure that are kept in the status
SILENCE = timedelta(
    seconds=30
)  # twice as long as the operator waits for an answer; less than this says nothing


@dataclass(frozen=True, slots=True)
class GroupHealth:
    """``stalled``: the group has to be started anew. ``given_up``: it has not to be started at all."""

    restarts: int = 0
    last_restart: str | None = None
    last_failure: str | None = None
    seen: WorkersSeen | None = None
    stalled: Cause | None = None
    given_up: Cause | None = None


def health(view: PipelineView, wanted: bool, incomplete: bool, now: datetime) -> GroupHealth:
    """How the group of ``view`` fares. ``wanted``: a task needs it. ``incomplete``: some workers get no node.

    1. A changed spec, another configuration of the workers (such as a default image that was corrected), or no task that
       needs them begins the count anew: someone has acted.
    2. A restart of the coordinator's process in the same pod is one failure of the group, since every rank's failure
       ends all ranks. It is none when a pod of the group was deleted: by a drain, by hand, or by the operator; nor while
       workers get no node, since those that have one can only wait for them.
    3. A group that stands still counts as one failure when that is noticed.
    4. Progress ``restarts.resetAfter`` after the last failure sets the count back.
    5. More failures than ``restarts.limit``, or a worker that says that it cannot serve: given up.
    """
    spec, status = view.pipeline.spec, view.pipeline.status
    assert spec is not None
    failures, seen = _failures_since(status.workers_seen, view.group)
    if not wanted or not is_of_now(view):
        return GroupHealth(seen=seen)
    failures = 0 if incomplete else failures
    stalled = stall(view, now)
    if stalled is not None and not is_true(status.conditions, c.STALLED):
        failures += 1
    restarts, last = (status.restarts or 0) + failures, not_ahead(status.last_restart, now)
    words = _last_words(view) or status.last_failure
    if failures:
        last = timestamp(now)
        words = stalled.message if stalled is not None else words or "the worker reported nothing"
    elif last is not None and _has_moved(view, parse_time(last)):
        restarts = 0
    given_up = _given_up(view, restarts, words)
    if not restarts and given_up is None:
        return GroupHealth(seen=seen, stalled=stalled)
    return GroupHealth(restarts, last, words[:WORDS_LIMIT] if words else None, seen, stalled, given_up)


def is_of_now(view: PipelineView) -> bool:
    """What the status remembers of failures and refusals is of the spec and the configuration that the workers shall have
    now. Where a former operator has not written of which configuration, it is of the one that the group has."""
    status = view.pipeline.status
    counted = status.revision or (view.group.revision if view.group is not None else None)
    same = counted is None or view.revision is None or counted == view.revision
    return same and status.observed_generation == view.pipeline.generation


def _has_moved(view: PipelineView, since: datetime) -> bool:
    """Progress was seen long enough after the last failure."""
    assert view.pipeline.spec is not None
    moved = view.contact.progressed
    return moved is not None and moved - since >= parse_duration(view.pipeline.spec.restarts.reset_after)


def stall(view: PipelineView, now: datetime) -> Cause | None:
    """Why the group has to be started anew although all its processes live, or None.

    A slow step is none: every microbatch counts. A coordinator counts as silent from the moment at which its workers were
    ready, so that a long start is none either.
    """
    spec, contact, group = view.pipeline.spec, view.contact, view.group
    assert spec is not None
    patience = parse_duration(spec.stall_timeout)
    if not patience or group is None or not group.replicas:
        return None
    if view.report is not None:
        since = contact.still_since
        if since is None or now - since < patience:
            return None
        return Cause(
            c.REASON_NO_PROGRESS,
            f"tasks are training, but no microbatch has completed for {spec.stall_timeout} (spec.stallTimeout)",
        )
    if contact.starting or contact.lost_since is None or not _whole(group):
        return None
    since = max([contact.lost_since, *(pod.ready_since for pod in group.pods if pod.ready_since is not None)])
    if now - since < max(patience, SILENCE):
        return None
    return Cause(
        c.REASON_NOT_RESPONDING,
        f"the workers are ready, but their coordinator has not responded for {spec.stall_timeout} "
        f"(spec.stallTimeout): {contact.error}",
    )


def _given_up(view: PipelineView, restarts: int, words: str | None) -> Cause | None:
    spec, held = view.pipeline.spec, view.pipeline.status.given_up
    assert spec is not None
    way_out = "fix the cause, then change the pipeline's spec, or suspend and resume its tasks"
    if held == c.REASON_CANNOT_SERVE or any(ending.is_final for _, ending in _endings(view)):
        return Cause(c.REASON_CANNOT_SERVE, f"the workers cannot serve this pipeline: {words}; {way_out}")
    if held == c.REASON_RESTART_LIMIT or restarts > spec.restarts.limit:
        return Cause(
            c.REASON_RESTART_LIMIT,
            f"the workers failed {restarts} times in a row, and spec.restarts.limit is "
            f"{spec.restarts.limit}; last failure: {words}; {way_out}",
        )
    return None


def _failures_since(seen: WorkersSeen | None, group: WorkerGroup | None) -> tuple[int, WorkersSeen | None]:
    """How often the coordinator's process was started again since ``seen`` in a group that lost no pod."""
    if group is None or not group.replicas:
        return 0, None
    present = tuple(pod for pod in group.pods if not pod.deleting)
    uids = tuple(pod.uid for pod in present)
    first = next((pod for pod in present if pod.key.name.endswith("-0")), None)
    if seen is None:  # what happened before anybody counted is not counted
        known = WorkersSeen(pods=uids)
        return 0, known.model_copy(update={"first": first.uid, "starts": first.restarts}) if first else known
    replaced = seen.replaced or not set(seen.pods) <= set(uids)
    if first is None:
        return 0, seen.model_copy(update={"pods": uids, "replaced": replaced})
    if first.uid != seen.first:  # a new coordinator: what it was restarted for is told by its own pod alone
        replaced, before = False, 0
    else:
        before = seen.starts
    failures = max(0, first.restarts - before)
    if failures and replaced:
        failures, replaced = failures - 1, False
    return failures, WorkersSeen(pods=uids, first=first.uid, starts=first.restarts, replaced=replaced)


def _whole(group: WorkerGroup) -> bool:
    return len(group.pods) == group.replicas == group.ready


def _endings(view: PipelineView) -> list[tuple[Pod, ProcessEnding]]:
    """How processes of the present configuration ended."""
    pods = view.group.pods if view.group is not None else ()
    return [
        (pod, pod.ended)
        for pod in pods
        if pod.ended is not None and pod.revision == view.revision and not pod.deleting
    ]


def _last_words(view: PipelineView) -> str | None:
    """Of the process that is the cause; one that only lost its peer explains nothing."""
    causes = [(pod, ending) for pod, ending in _endings(view) if ending.is_cause]
    causes.sort(key=lambda cause: not cause[1].is_final)
    return f"pod {causes[0][0].key.name}: {causes[0][1].words}" if causes else None
