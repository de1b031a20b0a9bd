"""Who has a place in a pipeline's memory: the scheduler asked about real tasks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime

from mlora_operator.api.units import parse_bytes, parse_duration
from mlora_operator.memory.fit import StageFit
from mlora_operator.memory.learned import learn
from mlora_operator.memory.model import Demand, MemoryModel
from mlora_operator.memory.origin import origin_of
from mlora_operator.memory.room import room_of
from mlora_operator.reconcile.asks import of_model
from mlora_operator.reconcile.limits import held_up
from mlora_operator.reconcile.roster import roster
from mlora_operator.reconcile.snapshot import Task
from mlora_operator.reconcile.standing import candidate, policy_of
from mlora_operator.reconcile.view import View
from mlora_operator.scheduling.admission import Outcome, Place
from mlora_operator.scheduling.entrant import State
from mlora_operator.scheduling.order import in_order
from mlora_operator.scheduling.room import Beside
from mlora_operator.scheduling.schedule import schedule
from mlora_worker.protocol import ModelFacts, StageReport

_ADMITTED = Place(Outcome.ADMITTED)
_SUSPENDED = Place(Outcome.SUSPENDED)


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
    read = roster(view)
    inside = [one for one in read.entrants if one.state is not State.WAITING]
    if view.shape is None:
        return {one.uid: _SUSPENDED if one.uid in read.suspended else _ADMITTED for one in inside}
    room = room_of(_memory(view, view.shape, read.demands))
    most = view.pipeline.spec.namespace_limits.training
    over = held_up(read.entrants, most)
    entrants = tuple(one for one in read.entrants if one.uid not in over) if over else read.entrants
    outcome = scheduler(
        entrants, room, policy_of(view, scheduling, now), now, parse_duration(scheduling.hold_back)
    )
    suspended = {uid: _SUSPENDED for uid in read.suspended if outcome[uid].outcome is Outcome.PREEMPTED}
    never = {
        uid: Place(Outcome.NEVER_FITS, Beside(room, room.held(()), uid))
        for uid in read.unready
        if not room.fits_alone(uid)
    }
    refused = {uid: Place(Outcome.REFUSED, failure=failure) for uid, failure in read.refused.items()}
    limited = {uid: Place(Outcome.WAITING, limit=most) for uid in over}
    return {**outcome, **limited, **suspended, **never, **refused}


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
    """From the status, as far as that was learned of the same, and from what the workers say now, unless they still have a
    former spec."""
    assert view.pipeline.spec is not None
    origin = origin_of(view.pipeline.spec, model.stages)
    images = (None, view.image)  # None: of a version that did not write it down
    held = [one for one in view.pipeline.status.memory if one.origin == origin and one.image in images]
    report = view.present_report
    return learn(
        model,
        held,
        report.memory if report is not None else (),
        report.exhausted if report is not None else (),
    )
