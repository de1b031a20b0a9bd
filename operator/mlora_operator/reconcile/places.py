"""Who has a place in a pipeline's memory: the scheduler asked about real tasks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from mlora_operator.api.units import parse_bytes, parse_duration
from mlora_operator.memory.fit import StageFit
from mlora_operator.memory.learned import learn
from mlora_operator.memory.model import MemoryModel, demand_of
from mlora_operator.memory.room import room_of
from mlora_operator.reconcile.snapshot import Task
from mlora_operator.reconcile.standing import candidate, entrant, policy_of
from mlora_operator.reconcile.view import View
from mlora_operator.scheduling.admission import Outcome, Place
from mlora_operator.scheduling.entrant import State
from mlora_operator.scheduling.order import in_order
from mlora_operator.scheduling.room import Sum
from mlora_operator.scheduling.schedule import schedule
from mlora_worker.stream.fit import misfit


def places(view: View, now: datetime) -> Mapping[str, Place]:
    """The place of each task that the scheduler can speak of, by uid.

    Nobody new is let in before the workers have told the model's shape. A task is let in once its rows are
    prepared, so that a slow or broken dataset holds no memory; one that can never fit the memory or the model is told
    so before that, and no worker is started for it where the shape is still known from a former run.

    A suspended task is spoken of as long as it holds memory: it leaves like one that is preempted.
    """
    assert view.pipeline.spec is not None
    scheduling = view.pipeline.spec.scheduling
    open_tasks = {task.uid: task for task in view.tasks if task.spec is not None}
    found = {uid: entrant(view, task) for uid, task in open_tasks.items()}
    inside = [one for one in found.values() if one is not None and one.state is not State.WAITING]
    suspended = {uid for uid, task in open_tasks.items() if task.spec is not None and task.spec.suspend}
    outside = open_tasks.keys() - {one.uid for one in inside} - suspended
    refused = _refused(view, [open_tasks[uid] for uid in outside])
    outside -= refused.keys()
    memory = memory_model(view)
    if memory is None:
        return {one.uid: Place(Outcome.ADMITTED) for one in inside}
    ready = [] if view.draining else [one for uid in outside if (one := found[uid]) is not None]
    room = room_of(memory)
    outcome = schedule(
        (*inside, *ready),
        room,
        policy_of(view, scheduling, now),
        now,
        parse_duration(scheduling.hold_back),
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


def _refused(view: View, tasks: Sequence[Task]) -> Mapping[str, Place]:
    """Of ``tasks``, those that the base model's shape forbids."""
    if view.shape is None:
        return {}
    facts, _ = view.shape
    failures = {
        task.uid: misfit(facts, task.spec.lora, task.spec.training) for task in tasks if task.spec is not None
    }
    return {
        uid: Place(Outcome.REFUSED, failure=failure)
        for uid, failure in failures.items()
        if failure is not None
    }


def ordered(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """Tasks in the scheduler's order."""
    by_uid = {task.uid: task for task in tasks}
    return tuple(by_uid[one.uid] for one in in_order(candidate(task) for task in tasks))


def memory_model(view: View) -> MemoryModel | None:
    """The memory of the pipeline with what its tasks ask for; None while the model's shape is not known."""
    spec = view.pipeline.spec
    if spec is None or view.shape is None:
        return None
    facts, stages = view.shape
    model = MemoryModel(
        facts=facts,
        stages=stages,
        microbatch_tokens=spec.microbatch_tokens,
        budget=parse_bytes(spec.memory.budget) if spec.memory.budget else None,
        margin=spec.memory.margin,
        demands={
            task.uid: demand_of(task.spec.lora, task.spec.training, facts.max_positions)
            for task in view.tasks
            if task.spec is not None
        },
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
