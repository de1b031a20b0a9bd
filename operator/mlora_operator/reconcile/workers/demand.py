"""A pipeline with who is admitted to its memory; without the tasks of which that cannot be said. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from mlora_operator.reconcile.admission.admit import AdmissionMemo, admissions
from mlora_operator.reconcile.admission.pipeline_view import PipelineView
from mlora_operator.reconcile.state.isolation import Isolation, culprits
from mlora_operator.reconcile.state.snapshot import Task
from mlora_operator.reconcile.workers.scale import wanted_by
from mlora_operator.scheduling.admission import Admission

Look = Callable[[tuple[Task, ...]], PipelineView]


@dataclass(frozen=True, slots=True)
class PipelineDemand:
    """A pipeline, who is admitted to its memory, and for whom its workers run."""

    view: PipelineView
    placed: Mapping[str, Admission]
    wanting: tuple[Task, ...]


def demand_of(
    tasks: tuple[Task, ...], look: Look, known: AdmissionMemo, now: datetime, isolation: Isolation
) -> PipelineDemand:
    """``look``: at the pipeline with some tasks. Raises what is the pipeline's own; tasks that are the cause are isolated.

    1. What raises without any task is the pipeline's; so is what raises with each of several.
    2. Else the causes are the tasks with which it raises though they are alone.
    """
    try:
        return _demand(look(tasks), known, now)
    except Exception:
        _demand(look(()), AdmissionMemo(), now)
        found = culprits(tasks, lambda task: _demand(look((task,)), AdmissionMemo(), now))
        if not found or len(found) == len(tasks) > 1:
            raise
    for task in tasks:
        if task.key in found:
            isolation.isolate_task(task, found[task.key])
    contact = look(()).contact
    kept = tuple(isolation.as_judged(task) for task in tasks if task.key not in found or contact.keeps(task))
    return _demand(look(kept), known, now)


def _demand(one: PipelineView, known: AdmissionMemo, now: datetime) -> PipelineDemand:
    if one.pipeline.spec is None:
        return PipelineDemand(one, {}, ())
    placed = admissions(one, now, known)
    return PipelineDemand(one, placed, wanted_by(one, placed))
