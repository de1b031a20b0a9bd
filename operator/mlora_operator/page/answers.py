"""From a pass of the loop to the API's documents. Pure: the same pass, the same answer, however often it is asked for."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from mlora_operator.api import conditions as c
from mlora_operator.api.meta import Condition, timestamp
from mlora_operator.page.board import LastDecision
from mlora_operator.page.choosing import Choice, chosen
from mlora_operator.page.curves import Drawn, thinned
from mlora_operator.page.documents import (
    CurveDocument,
    Losses,
    Overview,
    PipelineDocument,
    StageDocument,
    TaskDocument,
    TaskList,
)
from mlora_operator.page.events import shortened
from mlora_operator.page.numbers import number, rounded, speed
from mlora_operator.page.order import TRAINING_STATES, Lists, Standing
from mlora_operator.reconcile.admission.capacity import memory_model
from mlora_operator.reconcile.admission.pipeline_view import PipelineView
from mlora_operator.reconcile.admission.workload import waits_since
from mlora_operator.reconcile.state.snapshot import condition, is_true
from mlora_worker.protocol import Report

logger = logging.getLogger(__name__)
MOST_TASKS = 100  # of one answer
MOST_PIPELINES = 100
MOST_NAMESPACES = 500
MOST_CURVES = 24
MOST_COMPARED = 8  # curves that are asked for by uid
POINTS_SHOWN = 160  # of a curve beside many others

ListName = Literal["waiting", "training", "finished"]

# Whose message tells most of a task in a state; by default that of Admitted, or of Accepted where that is refused.
_TELLING = {
    "Succeeded": c.SUCCEEDED,
    "Failed": c.FAILED,
    "Training": c.RUNNING,
    "Saving": c.RUNNING,
    "UploadBlocked": c.UPLOAD_BLOCKED,
}


def overview(sight: LastDecision, lists: Lists, namespace: str | None) -> Overview:
    """Of all namespaces, or what concerns one: its tasks, and the pipelines that it has or uses."""
    ours = chosen(lists, lists.everyone, Choice(namespace))
    used = {one.status.pipeline for one in ours}
    views = [
        view
        for view in lists.views
        if namespace is None or view.pipeline.key.namespace == namespace or str(view.pipeline.key) in used
    ]
    training: defaultdict[str | None, list[Standing]] = defaultdict(list)
    for one in lists.training:
        training[one.status.pipeline].append(one)
    waiting = Counter(one.status.pipeline for one in lists.waiting)

    def shown(view: PipelineView) -> PipelineDocument:
        here = str(view.pipeline.key)
        return _pipeline(sight, view, training[here], waiting[here], namespace)

    return Overview(
        namespaces=tuple(sorted({one.task.key.namespace for one in lists.everyone})[:MOST_NAMESPACES])
        if namespace is None
        else (namespace,),
        states=dict(sorted(Counter(one.state for one in ours).items())),
        tokens_per_second=rounded(sum(speed(one) or 0.0 for one in ours)),
        pipelines=tuple(map(shown, views[:MOST_PIPELINES])),
        pipelines_total=len(views),
    )


def tasks(
    lists: Lists, colours: Mapping[str, int], name: ListName, choice: Choice, offset: int, limit: int
) -> TaskList:
    """``limit`` tasks of a list, from the one at ``offset`` on."""
    found = chosen(lists, lists.named(name), choice)
    part = found[offset : offset + limit]
    return TaskList(
        list=name,
        total=len(found),
        offset=offset,
        tasks=tuple(task_document(one, colours.get(one.task.uid)) for one in part),
    )


def with_curves(lists: Lists, kept: Mapping[str, int], choice: Choice) -> list[Standing]:
    """Whose losses are kept: those in training, then those that are waiting again, then the last that finished."""
    return [one for one in lists.everyone if one.task.uid in kept and choice.takes(one, lists)]


def losses(
    shown: Iterable[Standing], total: int, curves: Mapping[str, Drawn], points: int = POINTS_SHOWN
) -> Losses:
    """Of ``shown``, as far as there are ``curves``, with so many points at most; ``total``: how many could be shown."""
    return Losses(
        total=total,
        curves=tuple(
            curve_document(one, thinned(curves[one.task.uid], points))
            for one in shown
            if one.task.uid in curves
        ),
    )


def _pipeline(
    sight: LastDecision,
    view: PipelineView,
    training: Sequence[Standing],
    waiting: int,
    namespace: str | None,
) -> PipelineDocument:
    pipeline = view.pipeline
    status = sight.pipeline_statuses.get(pipeline.key, pipeline.status)
    spec, group, contact = pipeline.spec, view.group, view.contact
    stalled = is_true(status.conditions, c.STALLED)
    rejects = is_true(status.conditions, c.PLAN_REJECTED)
    telling = condition(status.conditions, c.STALLED if stalled else c.PLAN_REJECTED if rejects else c.READY)
    up = group is not None and group.replicas > 0
    if not up:
        coordinator: Literal["answers", "starting", "lost", "none"] = "none"
    elif contact.report is not None and contact.lost_since is None:
        coordinator = "answers"
    else:
        coordinator = "lost" if contact.report is not None and not contact.starting else "starting"
    lost = contact.lost_since if coordinator == "lost" else None
    return PipelineDocument(
        namespace=pipeline.key.namespace,
        name=pipeline.key.name,
        base_model=spec.model.name if spec is not None else "",
        state=status.state or "Pending",
        reason=telling.reason if telling is not None else "",
        # A worker's last words may name tasks of others.
        message=_short(telling) if namespace in (None, pipeline.key.namespace) else "",
        policy=spec.scheduling.policy if spec is not None else "",
        workers=group.replicas if group is not None else 0,
        ready_workers=group.ready if group is not None else 0,
        training=len(training),
        waiting=waiting,
        restarts=status.restarts or 0,
        tokens_per_second=rounded(sum(speed(one) or 0.0 for one in training)),
        coordinator=coordinator,
        lost_since=timestamp(lost) if lost is not None else None,
        stages=_stages(view, training),
    )


def _stages(view: PipelineView, training: Iterable[Standing]) -> tuple[StageDocument, ...]:
    """The stages with what is predicted of those who have a place there, by the memory model that admits them. None where
    that cannot be worked out: the pipeline's condition says why, and the page shows all others."""
    try:
        return _predicted(view, training)
    except Exception as error:
        logger.debug("no stages of %s can be shown: %r", view.pipeline.key, error)
        return ()


def _predicted(view: PipelineView, training: Iterable[Standing]) -> tuple[StageDocument, ...]:
    model = memory_model(view)
    if model is None:
        return ()
    placed = {one.task.uid for one in training} | {
        task.uid for task in view.tasks if task.uid in view.active or _has_place(task.admitted)
    }
    checks = model.by_stage(sorted(uid for uid in placed if uid in model.demands))
    used = _used(view.report)
    return tuple(
        StageDocument(
            stage=stage.stage,
            first_layer=stage.first_layer,
            last_layer=stage.last_layer,
            device=stage.device,
            weights=stage.resident_bytes,
            predicted=check.needed,
            used=used.get(stage.stage) if placed else None,
            budget=check.budget,
        )
        for stage, check in zip(model.stages, checks, strict=True)
    )


def _has_place(admitted: Condition | None) -> bool:
    return admitted is not None and admitted.status == "True"


def _used(report: Report | None) -> dict[int, int]:
    """By stage, from the newest measurement; the whole process where a stage does not know its own allocations."""
    samples = report.memory if report is not None else ()
    return {one.stage: used for one in samples if (used := one.used_bytes or one.rss_bytes)}


def task_document(one: Standing, colour: int | None) -> TaskDocument:
    task, status, spec = one.task, one.status, one.task.spec
    finished = status.completion_time is not None
    training = one.state in TRAINING_STATES
    telling = _telling(one)
    return TaskDocument(
        uid=task.uid,
        namespace=task.key.namespace,
        name=task.key.name,
        base_model=spec.base_model if spec is not None else "",
        state=one.state,
        reason=status.reason or (telling.reason if telling is not None else ""),
        message=_short(telling),
        priority=spec.priority if spec is not None else 0,
        pipeline=status.pipeline,
        place=one.place,
        colour=colour,
        created=timestamp(task.created),
        waits_since=None if finished or training else timestamp(waits_since(task)),
        started=status.start_time,
        completed=status.completion_time,
        step=status.step,
        total_steps=status.total_steps,
        loss=number(status.loss),
        evaluation_loss=number(status.evaluation_loss),
        tokens_per_second=speed(one),
        eta=status.eta if training else None,
        restarts=status.restarts or 0,
        preemptions=status.preemptions or 0,
        adapter=status.adapter.uri if status.adapter is not None and one.state == "Succeeded" else None,
    )


def _telling(one: Standing) -> Condition | None:
    held = one.status.conditions
    if one.state in _TELLING:
        return condition(held, _TELLING[one.state])
    accepted = condition(held, c.ACCEPTED)
    if accepted is not None and accepted.status == "False":
        return accepted
    return condition(held, c.ADMITTED) or accepted


def curve_document(one: Standing, drawn: Drawn) -> CurveDocument:
    key = one.task.key
    return CurveDocument(
        uid=one.task.uid,
        namespace=key.namespace,
        name=key.name,
        colour=drawn.colour,
        training=one.state in TRAINING_STATES,
        total_steps=one.status.total_steps,
        steps=drawn.steps,
        losses=tuple(float(f"{loss:.5g}") for loss in drawn.losses),
        evaluations=tuple((step, float(f"{loss:.5g}")) for step, loss in drawn.evaluations),
    )


def _short(telling: Condition | None) -> str:
    return shortened(telling.message) if telling is not None else ""
