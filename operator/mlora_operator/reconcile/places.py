"""Who has a place in a pipeline's memory: the scheduler asked about real tasks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlora_operator.api import conditions
from mlora_operator.api.units import parse_bytes
from mlora_operator.memory.model import MemoryModel, demand_of
from mlora_operator.reconcile.snapshot import Task, is_true
from mlora_operator.reconcile.view import View
from mlora_operator.scheduling.admission import Outcome, Place, admit
from mlora_operator.scheduling.order import Candidate, in_order
from mlora_worker.protocol import TaskPhase
from mlora_worker.stream.fit import misfit


def places(view: View) -> Mapping[str, Place]:
    """The place of each task that the scheduler can speak of, by uid.

    Nobody new is let in before the workers have told the model's shape. A task is let in once its rows are
    prepared, so that a slow or broken dataset holds no memory; one that can never fit the memory or the model is told
    so before that, and no worker is started for it where the shape is still known from a former run.
    """
    wanting = [task for task in view.tasks if task.spec is not None and not task.spec.suspend]
    running = [task for task in wanting if holds_place(view, task)]
    refused = _refused(view, [task for task in wanting if not holds_place(view, task)])
    waiting = [task for task in wanting if not holds_place(view, task) and task.uid not in refused]
    memory = memory_model(view)
    if memory is None:
        return {task.uid: Place(Outcome.ADMITTED) for task in running}
    outcome = admit(
        waiting=[candidate(task) for task in waiting if _is_prepared(view, task) and not view.draining],
        running=[candidate(task) for task in running],
        fits=memory.verdict,
    )
    alone = {task.uid: memory.verdict([task.uid]) for task in waiting if task.uid not in outcome}
    never = {uid: Place(Outcome.NEVER_FITS, verdict) for uid, verdict in alone.items() if not verdict.fits}
    return {**outcome, **never, **refused}


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


def holds_place(view: View, task: Task) -> bool:
    """The task trains, or was told that it may and has not begun yet."""
    return task.uid in view.active or (
        _is_prepared(view, task) and is_true(task.status.conditions, conditions.ADMITTED)
    )


def candidate(task: Task) -> Candidate:
    assert task.spec is not None
    return Candidate(task.uid, task.key.namespace, task.key.name, task.spec.priority, task.created)


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
    return MemoryModel(
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


def _is_prepared(view: View, task: Task) -> bool:
    reported = view.reported(task)
    return reported is not None and reported.phase is TaskPhase.PREPARED
