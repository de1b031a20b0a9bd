"""Who has a place in a pipeline's memory: the scheduler asked about real tasks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime

from mlora_operator.api.units import parse_bytes, parse_duration
from mlora_operator.memory.fit import StageFit
from mlora_operator.memory.learned import learn
from mlora_operator.memory.model import Demand, MemoryModel
from mlora_operator.memory.room import room_of
from mlora_operator.reconcile.asks import of_model
from mlora_operator.reconcile.snapshot import Task
from mlora_operator.reconcile.standing import candidate, entrants, policy_of
from mlora_operator.reconcile.view import View
from mlora_operator.scheduling.admission import Outcome, Place
from mlora_operator.scheduling.entrant import State
from mlora_operator.scheduling.order import in_order
from mlora_operator.scheduling.room import Sum
from mlora_operator.scheduling.schedule import schedule
from mlora_worker.protocol import ModelFacts, StageReport

_ADMITTED = Place(Outcome.ADMITTED)


def places(
    view: View, now: datetime, scheduler: Callable[..., Mapping[str, Place]] = schedule
) -> Mapping[str, Place]:
    """The place of each task that the scheduler can speak of, by uid.

    Nobody new is let in before the workers have told the model's shape. A task is let in once its rows are
    prepared, so that a slow or broken dataset holds no memory; one that can never fit the memory or the model is told
    so before that, and no worker is started for it where the shape is still known from a former run.

    A suspended task is spoken of as long as it holds memory: it leaves like one that is preempted.
    """
    assert view.pipeline.spec is not None
    scheduling = view.pipeline.spec.scheduling
    open_tasks = {task.uid: task for task in view.tasks if task.spec is not None}
    suspended = {uid for uid, task in open_tasks.items() if task.spec is not None and task.spec.suspend}
    found = entrants(view, open_tasks.values())
    inside = [one for one in found.values() if one.state is not State.WAITING]
    outside = open_tasks.keys() - {one.task.uid for one in inside} - suspended
    if view.shape is None:
        return {one.task.uid: _ADMITTED for one in inside}
    known = of_model(view.shape[0])
    asked = {uid: known.of(task.spec) for uid, task in open_tasks.items() if task.spec is not None}
    refused = {
        uid: Place(Outcome.REFUSED, failure=asked[uid].misfit)
        for uid in outside
        if asked[uid].misfit is not None
    }
    outside -= refused.keys()
    ready = [] if view.draining else [found[uid] for uid in outside if uid in found]
    room = room_of(_memory(view, view.shape, {uid: one.demand for uid, one in asked.items()}))
    outcome = scheduler(
        (*inside, *ready), room, policy_of(view, scheduling, now), now, parse_duration(scheduling.hold_back)
    )
    leave = {
        uid: Place(Outcome.SUSPENDED)
        for uid, place in outcome.items()
        if uid in suspended and place.outcome is Outcome.PREEMPTED
    }
    never = {
        uid: Place(Outcome.NEVER_FITS, Sum(room, room.held((uid,))))
        for uid in outside - outcome.keys()
        if not room.fits_alone(uid)
    }
    return {**outcome, **leave, **never, **refused}


def ordered(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """Tasks in the scheduler's order."""
    by_uid = {task.uid: task for task in tasks}
    return tuple(by_uid[one.uid] for one in in_order(candidate(task) for task in tasks))


def memory_model(view: View) -> MemoryModel | None:
    """The memory of the pipeline with what its tasks ask for; None while the model's shape is not known."""
    if view.pipeline.spec is None or view.shape is None:
        return None
    known = of_model(view.shape[0])
    demands = {task.uid: known.of(task.spec).demand for task in view.tasks if task.spec is not None}
    return _memory(view, view.shape, demands)


def _memory(
    view: View, shape: tuple[ModelFacts, tuple[StageReport, ...]], demands: Mapping[str, Demand]
) -> MemoryModel:
    spec = view.pipeline.spec
    assert spec is not None
    facts, stages = shape
    model = MemoryModel(
        facts=facts,
        stages=stages,
        microbatch_tokens=spec.microbatch_tokens,
        budget=parse_bytes(spec.memory.budget) if spec.memory.budget else None,
        margin=spec.memory.margin,
        demands=demands,
        recompute=spec.recompute_activations,
    )
    return replace(model, learned=_learned(view, model))


def _learned(view: View, model: MemoryModel) -> Mapping[int, StageFit]:
    """From the status, as far as it speaks of this spec, and from what the workers say now."""
    status, report = view.pipeline.status, view.report
    held = status.memory if status.observed_generation == view.pipeline.generation else ()
    return learn(
        model,
        held,
        report.memory if report is not None else (),
        report.exhausted if report is not None else (),
    )
