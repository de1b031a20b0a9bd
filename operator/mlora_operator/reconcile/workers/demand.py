"""A pipeline with who has a place in its memory; without the tasks of which that cannot be said. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from mlora_operator.reconcile.admission.admit import Known, places
from mlora_operator.reconcile.admission.pipeline_view import View
from mlora_operator.reconcile.state.isolation import Apart, culprits
from mlora_operator.reconcile.state.snapshot import Task
from mlora_operator.reconcile.workers.scale import wanted_by
from mlora_operator.scheduling.admission import Place

Look = Callable[[tuple[Task, ...]], View]


@dataclass(frozen=True, slots=True)
class PipelineDemand:
    """A pipeline, who has a place in its memory, and for whom its workers run."""

    view: View
    placed: Mapping[str, Place]
    wanting: tuple[Task, ...]


def demand_of(
    tasks: tuple[Task, ...], look: Look, known: Known, now: datetime, apart: Apart
) -> PipelineDemand:
    """``look``: at the pipeline with some tasks. Raises what is the pipeline's own; tasks that are the cause stand apart.

    1. What raises without any task is the pipeline's; so is what raises with each of several.
    2. Else the causes are the tasks with which it raises though they are alone.
    """
    try:
        return _crew(look(tasks), known, now)
    except Exception:
        _crew(look(()), Known(), now)
        found = culprits(tasks, lambda task: _crew(look((task,)), Known(), now))
        if not found or len(found) == len(tasks) > 1:
            raise
    for task in tasks:
        if task.key in found:
            apart.task(task, found[task.key])
    contact = look(()).contact
    kept = tuple(apart.as_judged(task) for task in tasks if task.key not in found or contact.keeps(task))
    return _crew(look(kept), known, now)


def _crew(one: View, known: Known, now: datetime) -> PipelineDemand:
    if one.pipeline.spec is None:
        return PipelineDemand(one, {}, ())
    placed = places(one, now, known)
    return PipelineDemand(one, placed, wanted_by(one, placed))
