"""A pipeline with who is admitted to its memory; without the tasks of which that cannot be said. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from mlora_operator.reconcile.admission.admit import AdmissionMemo, admissions, ordered
from mlora_operator.reconcile.admission.pipeline_view import PipelineView
from mlora_operator.reconcile.admission.workload import sent_admissions
from mlora_operator.reconcile.state.isolation import Isolation, not_understood
from mlora_operator.reconcile.state.snapshot import Task
from mlora_operator.reconcile.workers.scale import wanted_by
from mlora_operator.scheduling.admission import Admission, AdmissionOutcome
from mlora_operator.scheduling.order import Candidate

_ADMITTED = Admission(AdmissionOutcome.ADMITTED)
Look = Callable[[tuple[Task, ...]], PipelineView]


@dataclass(frozen=True, slots=True)
class PipelineDemand:
    """A pipeline, who is admitted to its memory, and for whom its workers run."""

    view: PipelineView
    placed: Mapping[str, Admission]
    wanting: tuple[Task, ...]
    ordered: tuple[Task, ...] = ()  # all tasks, as plans list them


def demand_of(
    tasks: tuple[Task, ...], look: Look, known: AdmissionMemo, now: datetime, isolation: Isolation
) -> PipelineDemand:
    """``look``: at the pipeline with some tasks. Raises what is the pipeline's own, which it does without any task, too;
    tasks that are the cause are isolated.

    One that is isolated and trains stays with its spec, as long as the cause is not here: so its size is known.
    """
    if isolation.tasks:
        here = look(()).contact
        tasks = tuple(task for task in tasks if task.key not in isolation.tasks or here.keeps(task))
    try:
        return _demand(look(tasks), known, now)
    except Exception:
        found = isolation.isolate_culprits(tasks, lambda some: _demand(look(some), AdmissionMemo(), now))
        if not found:
            raise
    contact = look(()).contact
    kept = tuple(
        not_understood(task, isolation.tasks[task.key]) if task.key in found else task
        for task in tasks
        if task.key not in found or contact.keeps(task)
    )
    return _demand(look(kept), known, now)


def _demand(one: PipelineView, known: AdmissionMemo, now: datetime) -> PipelineDemand:
    if one.pipeline.spec is None:
        return PipelineDemand(one, {}, ())
    placed = admissions(one, now, known)
    unread = next((task for task in one.tasks if task.spec is None), None)
    if unread is not None:
        placed = _as_they_are(one, placed, unread.candidate)
    wanting = wanted_by(one, placed)
    return PipelineDemand(one, placed, wanting, ordered(one.tasks, one.pipeline.spec.scheduling))


def _as_they_are(
    one: PipelineView, placed: Mapping[str, Admission], unread: Candidate
) -> Mapping[str, Admission]:
    """Where the memory of one that trains is not known, nobody is let in beside it, nor put out for another."""
    told = sent_admissions(one)

    def stays(uid: str, place: Admission) -> Admission:
        if place.outcome is AdmissionOutcome.PREEMPTED:
            return _ADMITTED
        inside = uid in one.active or told.get(uid, False)
        return (
            Admission(AdmissionOutcome.WAITING, unsized=unread)
            if not inside and place == _ADMITTED
            else place
        )

    return {uid: stays(uid, place) for uid, place in placed.items()}
