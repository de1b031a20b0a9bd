"""Tasks in the order in which people look for them: who waits, who trains, who is done. Pure."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from mlora_operator.api.task import TaskStatus
from mlora_operator.page.board import LastDecision
from mlora_operator.reconcile.admission.pipeline_view import PipelineView, looks_back
from mlora_operator.reconcile.admission.workload import policy_of, progress_of, waits_since
from mlora_operator.reconcile.state.snapshot import Contact, Pipeline, Task
from mlora_operator.scheduling.entrant import Entrant, EntrantState

logger = logging.getLogger(__name__)
TRAINING_STATES = frozenset({"Training", "Saving", "UploadBlocked"})
FINAL_STATES = frozenset({"Succeeded", "Failed"})
OUT_OF_TURN = frozenset({"Suspended", "Rejected"})  # they wait for a person, not for their turn


@dataclass(frozen=True, slots=True)
class Standing:
    """A task with its newest status. ``place``: its turn in its pipeline, from 1; None for one that waits for no turn."""

    task: Task
    status: TaskStatus
    place: int | None = None

    @property
    def state(self) -> str:
        return self.status.state or "Pending"


@dataclass(frozen=True)
class Lists:
    """Each task is in one of the three. ``views``: the pipelines, with the tasks that are not finished."""

    waiting: tuple[Standing, ...]
    training: tuple[Standing, ...]
    finished: tuple[Standing, ...]
    views: tuple[PipelineView, ...]

    @cached_property
    def everyone(self) -> tuple[Standing, ...]:
        return (*self.training, *self.waiting, *self.finished)

    @cached_property
    def texts(self) -> Mapping[str, str]:
        """By uid, in lower case: what is searched for words."""
        return {one.task.uid: _searched(one) for one in self.everyone}

    def named(self, name: str) -> tuple[Standing, ...]:
        """``waiting``, ``training`` or ``finished``."""
        return {"waiting": self.waiting, "training": self.training, "finished": self.finished}[name]


def arrange(sight: LastDecision, now: datetime) -> Lists:
    """1. Waiting: pipeline by pipeline, in the order of its scheduling policy; those that wait for a person after them;
       last those that no pipeline has taken, by priority and age.
    2. Training: pipeline by pipeline, in the same order.
    3. Finished: the last one first.
    """
    members: defaultdict[str, list[Standing]] = defaultdict(list)
    homeless: list[Standing] = []
    finished: list[Standing] = []
    known = {str(pipeline.key) for pipeline in sight.pipelines}
    for task in sight.tasks:
        one = Standing(task, sight.task_statuses.get(task.key, task.status))
        if one.state in FINAL_STATES:
            finished.append(one)
        elif one.status.pipeline in known:
            members[one.status.pipeline].append(one)
        else:
            homeless.append(one)
    past = tuple(one.task for one in finished)
    waiting: list[Standing] = []
    training: list[Standing] = []
    views = []
    for pipeline in sorted(sight.pipelines, key=lambda one: one.key):
        own = members[str(pipeline.key)]
        view = _view(sight, pipeline, own, past)
        views.append(view)
        ordered = _by_policy(view, own, now)
        training += [one for one in ordered if one.state in TRAINING_STATES]
        queue = [one for one in ordered if one.state not in TRAINING_STATES]
        turns = [one for one in queue if one.state not in OUT_OF_TURN]
        waiting += [Standing(one.task, one.status, place) for place, one in enumerate(turns, 1)]
        waiting += [one for one in queue if one.state in OUT_OF_TURN]
    waiting += sorted(homeless, key=_without_pipeline)
    finished.sort(key=lambda one: (one.status.completion_time or "", one.task.uid), reverse=True)
    return Lists(tuple(waiting), tuple(training), tuple(finished), tuple(views))


def _view(
    sight: LastDecision, pipeline: Pipeline, own: Sequence[Standing], past: tuple[Task, ...]
) -> PipelineView:
    key = pipeline.key
    here = str(key)
    tasks = tuple(one.task for one in own)
    return PipelineView(
        pipeline=pipeline,
        tasks=tasks,
        group=sight.groups.get(key),
        contact=sight.contacts.get(key, Contact()),
        revision=sight.revisions.get(key),
        past=tuple(task for task in past if task.status.pipeline == here)
        if looks_back(pipeline, tasks)
        else (),
    )


def _by_policy(view: PipelineView, own: Sequence[Standing], now: datetime) -> list[Standing]:
    """The policy is asked about all of them, those whose rows are not prepared yet, too: it is where they will stand."""
    valid = {one.task.uid: one for one in own if one.task.spec is not None}
    rest = [one for one in own if one.task.spec is None]
    if view.pipeline.spec is None:
        return [*sorted(valid.values(), key=lambda one: one.task.candidate.key), *rest]
    try:
        policy = policy_of(view, view.pipeline.spec.scheduling, now)
        entrants = [
            Entrant(
                one.task.candidate, EntrantState.WAITING, waits_since(one.task), progress_of(view, one.task)
            )
            for one in valid.values()
        ]
        return [*(valid[one.uid] for one in policy.order(entrants)), *rest]
    except Exception as error:  # of this pipeline alone, whose condition says why
        logger.debug("no order of %s can be worked out: %r", view.pipeline.key, error)
        return [*sorted(valid.values(), key=lambda one: one.task.candidate.key), *rest]


def _searched(one: Standing) -> str:
    task, status = one.task, one.status
    model = task.spec.base_model if task.spec is not None else ""
    return f"{task.key} {model} {status.pipeline or ''} {status.reason or ''}".lower()


def _without_pipeline(one: Standing) -> tuple[int, datetime, str, str]:
    priority = one.task.spec.priority if one.task.spec is not None else 0
    return (-priority, one.task.created, one.task.key.namespace, one.task.key.name)
