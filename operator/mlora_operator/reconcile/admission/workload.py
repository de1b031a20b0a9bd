"""From what tasks say of themselves to the scheduler's entrants, and the policy that judges them. Pure.

Nothing here remembers anything: where a task stands follows from its coordinator's report, from the plan that the
coordinator took last, and from the objects' statuses, so that a restarted operator sees the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime, timedelta

from mlora_operator.api.pipeline import Scheduling
from mlora_operator.api.task import TaskStatus
from mlora_operator.api.units import parse_duration
from mlora_operator.reconcile.admission.pipeline_view import PipelineView, looks_back
from mlora_operator.reconcile.state.decode import parse_time
from mlora_operator.reconcile.state.snapshot import Task
from mlora_operator.scheduling.entrant import Entrant, EntrantProgress, EntrantState
from mlora_operator.scheduling.fair_share import FairShare
from mlora_operator.scheduling.order import Candidate
from mlora_operator.scheduling.policy import Policy
from mlora_operator.scheduling.priority import Priority
from mlora_operator.scheduling.shortest_remaining import ShortestRemaining
from mlora_worker.protocol import TaskPhase, TaskReport
from mlora_worker.stream.planner import rows_per_step


def candidate(task: Task) -> Candidate:
    return task.candidate


def entrant(view: PipelineView, task: Task, reported: TaskReport | None, may: bool | None) -> Entrant | None:
    """The task as the scheduler sees it; None when its rows are not prepared, or when it has ended.

    ``may``: whether the coordinator was told to admit it (``sent_admissions``).
    """
    state = _state(view, task, reported, may)
    if state is None:
        return None
    since = waits_since(task) if state is EntrantState.WAITING else _inside_since(task)
    return Entrant(task.candidate, state, since, _progress(task, task.status, reported))


def state_of(view: PipelineView, task: Task) -> EntrantState | None:
    """1. While the coordinator does not answer, whatever trained is taken to train on.
    2. A task that trains leaves once the coordinator has taken a plan that says so, or its user suspends it.
    3. One that is prepared, or was preempted, starts as soon as the coordinator was told to admit it, and waits before.
    4. One that the worker has put out for want of memory waits, whatever was told: it does not begin by itself.
    5. What a store refuses holds no memory: a finished task cannot be scheduled any more, and one that is out waits, though
       its checkpoint is not written yet. One whose checkpoint cannot be fetched is as if its rows were not prepared.
    """
    return _state(view, task, view.reported(task), sent_admissions(view).get(task.uid))


def _state(
    view: PipelineView, task: Task, reported: TaskReport | None, may: bool | None
) -> EntrantState | None:
    if reported is None:
        return EntrantState.RUNNING if task.uid in view.active else None
    phase = reported.phase
    if reported.crowded_out:
        return EntrantState.WAITING
    if phase is TaskPhase.SAVING:
        return None if reported.waits_for_store else EntrantState.SAVING
    is_out = phase is TaskPhase.PREPARED or phase is TaskPhase.PREEMPTED
    if is_out and reported.blocked is not None:
        return None
    if is_out or reported.waits_for_store:
        if may is None:
            held = task.admitted
            may = held is not None and held.status == "True"
        return EntrantState.STARTING if may else EntrantState.WAITING
    if phase is TaskPhase.TRAINING:
        assert task.spec is not None
        leaves = task.spec.suspend or may is False
        return EntrantState.LEAVING if leaves else EntrantState.RUNNING
    return None


def sent_admissions(view: PipelineView) -> Mapping[str, bool]:
    """Whether the last plan that this run of the coordinator took from us admits a task, by uid."""
    report, contact = view.report, view.contact
    return contact.sent_admissions if report is not None and contact.sent_run == report.run_id else {}


def waits_since(task: Task) -> datetime:
    """When the task was last preempted, or was created."""
    held = task.admitted
    if held is None or held.status == "True":
        return task.created
    return parse_time(held.last_transition_time)


def _inside_since(task: Task) -> datetime:
    """When it was admitted. Its status is written a little later than that: until then, when it was last preempted."""
    held = task.admitted
    return task.created if held is None else parse_time(held.last_transition_time)


def progress_of(view: PipelineView, task: Task) -> EntrantProgress:
    """From the report, or from the status as it was last written."""
    return _progress(task, task.status, view.reported(task))


def _progress(task: Task, status: TaskStatus, reported: TaskReport | None) -> EntrantProgress:
    assert task.spec is not None
    if reported is None:
        step, total, data = status.step or 0, status.total_steps, status.data
    else:
        step = reported.step
        total = reported.total_steps or status.total_steps
        data = reported.data or status.data
    if data is None or not data.used or not data.tokens:
        return EntrantProgress(step, total)
    rows = min(rows_per_step(task.spec.training), data.used)
    return EntrantProgress(step, total, data.tokens / data.used * rows)


def policy_of(view: PipelineView, scheduling: Scheduling, now: datetime) -> Policy:
    """Fair shares of one namespace are its priorities, which say the same as time passes: less has to be decided anew."""
    if scheduling.policy == "fairShare" and not looks_back(view.pipeline, view.tasks):
        return Priority()
    match scheduling.policy:
        case "priority":
            return Priority()
        case "shortestRemaining":
            return ShortestRemaining(now, parse_duration(scheduling.hold_back))
        case "fairShare":
            return FairShare(
                served=served_tokens(view, parse_duration(scheduling.half_life), now),
                weights=scheduling.weights,
                quantum=_speed(view) * parse_duration(scheduling.quantum).total_seconds() or math.inf,
            )


def served_tokens(view: PipelineView, half_life: timedelta, now: datetime) -> Mapping[str, float]:
    """Tokens that each namespace was served by this pipeline; what is ``half_life`` old counts half.

    Finished tasks count as long as their objects are there, deleted ones as far as they are known (``deleted_tasks``).
    A task is taken to have trained evenly from its start to its end, or until now.
    """
    served: defaultdict[str, float] = defaultdict(float)
    for task in (*view.tasks, *view.past):
        if task.spec is not None and task.status.start_time is not None:
            start = parse_time(task.status.start_time)
            end = parse_time(task.status.completion_time) if task.status.completion_time else now
            part = _what_still_counts(start, end, now, half_life)
            served[task.key.namespace] += progress_of(view, task).served_tokens * part
    for one in view.deleted:
        served[one.namespace] += one.tokens * _what_still_counts(one.start, one.end, now, half_life)
    return served


def served_by_status(task: Task, status: TaskStatus) -> float:
    """Tokens, as ``status`` of the task says."""
    return _progress(task, status, None).served_tokens if task.spec is not None else 0.0


def _what_still_counts(start: datetime, end: datetime, now: datetime, half_life: timedelta) -> float:
    """Mean of ``2 ** -(age / half_life)`` over a stretch of time. With no half-life: 1 for what goes on, 0 for the past."""
    if not half_life:
        return 1.0 if end >= now else 0.0
    length = max(0.0, (end - start) / half_life) * math.log(2)
    ago = max(0.0, (now - end) / half_life)
    mean = -math.expm1(-length) / length if length else 1.0
    return mean * math.exp2(-ago)


def _speed(view: PipelineView) -> float:
    """Tokens per second of the whole pipeline, as its tasks report them."""
    if view.report is None:
        return 0.0
    return sum(task.tokens_per_second or 0.0 for task in view.report.tasks)
