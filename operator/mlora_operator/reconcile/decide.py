"""From what is to what shall be: one pure function over everything. Reads from top to bottom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from mlora_operator.api.meta import timestamp
from mlora_operator.api.pipeline import PipelineStatus
from mlora_operator.api.task import TaskStatus
from mlora_operator.manifests.names import catalogue_name
from mlora_operator.manifests.pipeline import catalogue_hash, pipeline_manifest
from mlora_operator.reconcile.accept import Acceptance
from mlora_operator.reconcile.acceptances import acceptances
from mlora_operator.reconcile.closed_ports import explained
from mlora_operator.reconcile.deadlines import as_leaving, outlived, overdue
from mlora_operator.reconcile.decision import Decision, Event, Manifest
from mlora_operator.reconcile.health import health
from mlora_operator.reconcile.judging import looked_into
from mlora_operator.reconcile.memo import Memo
from mlora_operator.reconcile.pipelines import (
    invalid_status,
    pipeline_status,
    pods_to_delete,
    size,
    wanted_by,
    workers,
)
from mlora_operator.reconcile.places import places
from mlora_operator.reconcile.plans import Sources, known_generation, next_plan
from mlora_operator.reconcile.replicas import dealt, families, to_delete, to_make
from mlora_operator.reconcile.retries import told, tried_again
from mlora_operator.reconcile.scene import Scene, scene
from mlora_operator.reconcile.seats import seat
from mlora_operator.reconcile.snapshot import Key, Pipeline, Snapshot, Task
from mlora_operator.reconcile.starts import Turn, applicant, turns
from mlora_operator.reconcile.tasks import task_status
from mlora_operator.reconcile.transitions import news
from mlora_operator.reconcile.view import View, view
from mlora_operator.scheduling.admission import Outcome, Place
from mlora_operator.settings import CatalogueModel, NetworkPolicySettings, Settings
from mlora_worker.protocol import TaskPhase, TaskReport

_UNTOLD = Place(Outcome.UNTOLD)


def decide(snapshot: Snapshot, settings: Settings, now: datetime, memo: Memo | None = None) -> Decision:
    """What to do about a snapshot. ``memo``: of the decisions before; the answer is the same with any.

    0. New tasks are looked into, as far as one decision has time for that (``judging``).
    1. Each unfinished task is accepted by a pipeline or one of its replicas, or told why not. A finished one is never
       touched again, unless it failed and its user asks for another try, or its time to live is over.
    2. Each pipeline: who has a place in its memory.
    3. All pipelines together: whose workers may start, where not all of them get a place in the cluster.
    4. Each pipeline: how its workers fare, how many it needs, which plan its coordinator gets.
    5. Statuses follow, and events from what changed in them.
    """
    memo = memo or Memo()
    memo.turn()
    again = {
        task.key: task
        for one in snapshot.tasks
        if one.retry is not None and (task := tried_again(one, snapshot.contacts, now)) is not None
    }
    present = (again.get(task.key, task) for task in snapshot.tasks)
    open_tasks = [as_leaving(task, now) for task in present if not task.finished and not task.deleting]
    snapshot = looked_into(snapshot, open_tasks, memo.judging)
    accepted = acceptances(open_tasks, snapshot, settings, memo)
    shared = families(accepted, open_tasks, snapshot)
    accepted = dealt(accepted, open_tasks, shared, snapshot)
    members = _members(open_tasks, accepted)

    crews = [
        _crew(
            view(
                pipeline,
                tuple(members.get(pipeline.key, ())),
                snapshot,
                any_address=settings.allow_private_endpoints,
                now=now,
                rights=settings.rights,
            ),
            memo,
            now,
        )
        for pipeline in snapshot.pipelines
        if not pipeline.deleting
    ]
    may = turns(
        (applicant(crew.view, crew.wanting) for crew in crews if crew.view.pipeline.spec is not None), now
    )
    judged = _Judged(accepted, snapshot.told_lately, memo, settings.network_policy, now)
    decided = [
        _decide_pipeline(crew, may.get(crew.view.pipeline.key, Turn()), judged, snapshot, now)
        for crew in crews
    ]
    homeless = {
        task.key: task.status if accepted[task.key].held else judged.status(task, None, None, None)
        for task in open_tasks
        if accepted[task.key].pipeline is None
    }
    task_statuses = {key: status for one in decided for key, status in one.task_statuses.items()} | homeless
    pipeline_statuses = {key: status for one in decided for key, status in one.pipeline_statuses.items()}
    return Decision(
        task_statuses=task_statuses,
        pipeline_statuses=pipeline_statuses,
        new_pipelines=(
            *_from_catalogue(accepted, snapshot.pipelines, settings),
            *to_make(shared, snapshot),
        ),
        delete_pipelines=to_delete(shared, accepted, snapshot),
        workers={key: group for one in decided for key, group in one.workers.items()},
        delete_pods=tuple(pod for one in decided for pod in one.delete_pods),
        delete_tasks=tuple(task for task in snapshot.tasks if task.key not in again and outlived(task, now)),
        plans={key: plan for one in decided for key, plan in one.plans.items()},
        plan_sizes={key: size for one in decided for key, size in one.plan_sizes.items()},
        texts={key: texts for one in decided for key, texts in one.texts.items()},
        events=(
            *map(told, again.values()),
            *(event for task in open_tasks for event in judged.news.get(task.key, ())),
            *_events(snapshot.pipelines, pipeline_statuses),
        ),
        unjudged=snapshot.unjudged,
    )


@dataclass(frozen=True, slots=True)
class _Crew:
    """A pipeline, who has a place in its memory, and for whom its workers run."""

    view: View
    placed: Mapping[str, Place]
    wanting: tuple[Task, ...]


def _crew(one: View, memo: Memo, now: datetime) -> _Crew:
    if one.pipeline.spec is None:
        return _Crew(one, {}, ())
    placed = places(one, now, memo.places)
    return _Crew(one, placed, wanted_by(one, placed))


class _Judged:
    """The statuses of tasks, from what is known of them as far as it holds, and the ``news`` in them by key."""

    def __init__(
        self,
        accepted: Mapping[Key, Acceptance],
        told_lately: frozenset[str],
        memo: Memo,
        policy: NetworkPolicySettings,
        now: datetime,
    ) -> None:
        self._accepted, self._told_lately = accepted, told_lately
        self._known, self._now, self._stamp = memo.statuses, now, timestamp(now)
        self.plans = memo.plans
        self.policy = policy
        self.news: dict[Key, tuple[Event, ...]] = {}

    def status(
        self, task: Task, at: Scene | None, place: Place | None, reported: TaskReport | None
    ) -> TaskStatus:
        """See ``task_status``. Nothing but ``made_of`` goes into it."""
        acceptance, late = self._accepted[task.key], overdue(task, self._now)
        has = seat(task, place, words_stay=task.uid in self._told_lately)
        made_of = (task, at, acceptance.reason, acceptance.message, has, reported, late)
        known = self._known.known(task.uid, made_of)
        if known is None:
            status = task_status(task, acceptance, at, has, reported, late, self._now)
            held = task.status
            told = news("LoRATask", task.key, task.uid, held.conditions, status.conditions)
            known = status, tuple(told)
            if not self._is_of_this_moment(status):
                self._known.keep(task.uid, made_of, known)
        status, told_of = known
        if (
            status is not task.status and status == task.status
        ):  # the write has come back: the very object, from now on
            status, told_of = self._known.keep(task.uid, made_of, (task.status, ()))
        if told_of:
            self.news[task.key] = told_of
        return status

    def _is_of_this_moment(self, status: TaskStatus) -> bool:
        times = (status.start_time, status.completion_time)
        return self._stamp in times or any(
            one.last_transition_time == self._stamp for one in status.conditions
        )


def _decide_pipeline(crew: _Crew, turn: Turn, judged: _Judged, snapshot: Snapshot, now: datetime) -> Decision:
    seen, placed, wanting = crew.view, crew.placed, crew.wanting
    key = seen.pipeline.key
    if seen.pipeline.spec is None:
        return Decision(pipeline_statuses={key: invalid_status(seen, now)})
    fares = health(seen, bool(wanting), turn.gathers or turn.given_back, now)
    wish = size(seen, wanting, fares, turn, now)
    sources = Sources(snapshot.secrets, snapshot.config_maps, snapshot.texts_kept)
    planned = next_plan(seen, wanting, placed, sources, judged.plans)
    plan = planned.plan
    generation = plan.generation if plan is not None else known_generation(seen) or None
    group = workers(seen, wish)
    waiting = len([task for task in wanting if task.uid not in seen.active])
    here, reports = scene(seen, fares, turn, now), seen.contact.tasks if seen.report is not None else {}
    return Decision(
        task_statuses={
            task.key: task.status
            if _is_unreadable(task, seen) or task.uid in seen.unjudged
            else judged.status(
                task,
                here,
                _place(task, placed, planned.over),
                explained(task, reports.get(task.uid), seen.pipeline.spec, judged.policy),
            )
            for task in seen.tasks
        },
        pipeline_statuses={key: pipeline_status(seen, wish, fares, turn, waiting, generation, now)},
        workers={key: group} if group is not None else {},
        delete_pods=pods_to_delete(seen, fares),
        plans={key: plan} if plan is not None else {},
        plan_sizes={key: planned.size} if plan is not None else {},
        texts={key: planned.texts} if planned.texts else {},
    )


def _place(task: Task, placed: Mapping[str, Place], over: frozenset[str]) -> Place | None:
    return placed.get(task.uid, _UNTOLD) if task.uid in over else placed.get(task.uid)


def _is_unreadable(task: Task, seen: View) -> bool:
    """It trains, and its spec is not understood: nothing can be said of it but how it ends."""
    if task.spec is not None:
        return False
    reported = seen.reported(task)
    ended = reported is not None and reported.phase in (TaskPhase.SUCCEEDED, TaskPhase.FAILED)
    return not ended


def _members(tasks: list[Task], accepted: Mapping[Key, Acceptance]) -> Mapping[Key, list[Task]]:
    members: defaultdict[Key, list[Task]] = defaultdict(list)
    for task in tasks:
        pipeline = accepted[task.key].pipeline
        if pipeline is not None:
            members[pipeline.key].append(task)
    return members


def _from_catalogue(
    accepted: Mapping[Key, Acceptance], pipelines: tuple[Pipeline, ...], settings: Settings
) -> tuple[Manifest, ...]:
    """Pipelines that tasks wait for, and existing ones whose entry in the catalogue has changed since."""
    present = {one.key: one for one in pipelines}
    wanted = {one.wanted.name for one in accepted.values() if one.wanted is not None}
    return tuple(
        pipeline_manifest(model, settings.namespace)
        for model in settings.models
        if _is_due(model, present.get(Key(settings.namespace, catalogue_name(model.name))), wanted)
    )


def _is_due(model: CatalogueModel, present: Pipeline | None, wanted: set[str]) -> bool:
    if present is None:
        return model.name in wanted
    if present.deleting or present.catalogue_hash is None:
        return False
    return present.catalogue_hash != catalogue_hash(model)


def _events(
    pipelines: tuple[Pipeline, ...], pipeline_statuses: dict[Key, PipelineStatus]
) -> tuple[Event, ...]:
    events = []
    for pipeline in pipelines:
        if pipeline.key in pipeline_statuses:
            held, wished = pipeline.status.conditions, pipeline_statuses[pipeline.key].conditions
            events += news("LoRAPipeline", pipeline.key, pipeline.uid, held, wished)
    return tuple(events)
