"""From what is to what shall be: one pure function over everything. Reads from top to bottom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial

from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.api.task import TaskStatus
from mlora_operator.manifests.names import catalogue_name
from mlora_operator.manifests.pipeline import catalogue_hash, pipeline_manifest
from mlora_operator.reconcile.admission.pipeline_view import PipelineView, PipelineViews
from mlora_operator.reconcile.admission.spec_checks import looked_into
from mlora_operator.reconcile.assignment.assign import acceptances
from mlora_operator.reconcile.assignment.fit import PipelineMemories
from mlora_operator.reconcile.assignment.priority_bounds import as_counted
from mlora_operator.reconcile.assignment.replicas import ReplicaFamily, dealt, families, to_delete, to_make
from mlora_operator.reconcile.cache import Memo
from mlora_operator.reconcile.memoize import Memoized
from mlora_operator.reconcile.plan import Counted, Planned, Sources, known_generation, next_plan
from mlora_operator.reconcile.state.acceptance import Acceptance
from mlora_operator.reconcile.state.decision import Decision, Event, Manifest
from mlora_operator.reconcile.state.isolation import Isolation
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Snapshot, Task
from mlora_operator.reconcile.status.closed_ports import explained
from mlora_operator.reconcile.status.conditions import news
from mlora_operator.reconcile.status.incremental import TaskStatuses
from mlora_operator.reconcile.status.lifetime import as_leaving, outlived
from mlora_operator.reconcile.status.pipeline import invalid_status, pipeline_status
from mlora_operator.reconcile.status.pipeline_summary import pipeline_context
from mlora_operator.reconcile.status.plan_rejected import plan_rejected
from mlora_operator.reconcile.status.retries import retry_event, tried_again
from mlora_operator.reconcile.status.undecided import isolated_pipeline_status
from mlora_operator.reconcile.workers.demand import PipelineDemand, demand_of
from mlora_operator.reconcile.workers.gang import Applicant, GangTurn, Reach, applicant, bystander, turns
from mlora_operator.reconcile.workers.health import health
from mlora_operator.reconcile.workers.scale import pods_to_delete, size, workers
from mlora_operator.scheduling.admission import Admission, AdmissionOutcome
from mlora_operator.settings import CatalogueModel, Settings
from mlora_worker.protocol import TaskPhase

_NOT_IN_PLAN = Admission(AdmissionOutcome.NOT_IN_PLAN)
_NOT_SENT = Admission(AdmissionOutcome.NOT_SENT)


def decide(snapshot: Snapshot, settings: Settings, now: datetime, memo: Memo | None = None) -> Decision:
    """What to do about a snapshot. ``memo``: of the decisions before; the answer is the same with any.

    0. New tasks are looked into, as far as one decision has time for that (``spec_checks``).
    1. Each unfinished task is accepted by a pipeline or one of its replicas, or told why not. A finished one is never
       touched again, unless it failed and its user asks for another try, or its time to live is over.
    2. Each pipeline: who has a place in its memory.
    3. All pipelines together: whose workers may start, where not all of them get a place in the cluster.
    4. Each pipeline: how its workers fare, how many it needs, which plan its coordinator gets.
    5. Statuses follow, and events from what changed in them.

    What raises about one object isolates it, and all others are decided about (``isolation``).
    """
    memo = memo or Memo()
    memo.turn()
    isolation = Isolation.of(snapshot)
    again: dict[Key, Task] = {}
    for one in snapshot.tasks:
        if one.retry is not None:
            task = isolation.try_task(one, partial(tried_again, one, snapshot.contacts, now), None)
            if task is not None:
                again[task.key] = task
    present = (again.get(task.key, task) for task in snapshot.tasks)
    open_tasks = [
        isolation.try_task(task, partial(as_leaving, task, now), task)
        for task in present
        if not task.finished and not task.deleting
    ]
    over = tuple(
        task
        for task in snapshot.tasks
        if task.key not in again and isolation.try_task(task, partial(outlived, task, now), False)
    )
    views = PipelineViews(
        snapshot,
        any_address=settings.allow_private_endpoints,
        now=now,
        rights=settings.rights,
        isolation=isolation,
    )
    views.snapshot = snapshot = looked_into(views, open_tasks, memo.spec_checks, isolation)
    memories = PipelineMemories(open_tasks, views, isolation)
    accepted = acceptances(open_tasks, snapshot, settings, memo.assignment, memories.suits, isolation)
    understood = [_as_judged(task, accepted, isolation) for task in open_tasks]
    shared = families(accepted, understood, snapshot, isolation)
    accepted = dealt(accepted, understood, shared, snapshot, memories, isolation)
    members = _members(understood, accepted)

    demands = {}
    for pipeline in snapshot.pipelines:
        if not pipeline.deleting and pipeline.key not in isolation.pipelines:
            own = tuple(members.get(pipeline.key, ()))
            look = partial(views.of, pipeline)
            demand = isolation.try_pipeline(
                pipeline, partial(demand_of, own, look, memo.admissions, now, isolation), None
            )
            if demand is not None:
                demands[pipeline.key] = demand
    may = turns(_applicants(demands, snapshot, isolation, settings.rights.reach), now, settings.rights.reach)
    judged = TaskStatuses(
        accepted, snapshot.recently_written, memo.statuses, settings.network_policy, now, isolation
    )
    decided = [
        _decide_one(
            pipeline,
            demands.get(pipeline.key),
            members.get(pipeline.key, ()),
            may,
            judged,
            snapshot,
            memo.plans,
        )
        for pipeline in snapshot.pipelines
        if not pipeline.deleting
    ]
    homeless = {
        task.key: task.status
        if accepted[task.key].held and task.key not in isolation.tasks
        else judged.status(task, None, None, None)
        for task in understood
        if accepted[task.key].pipeline is None
    }
    task_statuses = {key: status for one in decided for key, status in one.task_statuses.items()} | homeless
    task_statuses |= {
        task.key: judged.isolated_status(task)
        for task in understood
        if task.key in isolation.tasks and task.key not in task_statuses
    }
    pipeline_statuses = {key: status for one in decided for key, status in one.pipeline_statuses.items()}
    return Decision(
        task_statuses=task_statuses,
        pipeline_statuses=pipeline_statuses,
        new_pipelines=(
            *_from_catalogue(accepted, snapshot.pipelines, settings),
            *_replicas(shared, snapshot, isolation),
        ),
        delete_pipelines=to_delete(shared, accepted, snapshot),
        workers={key: group for one in decided for key, group in one.workers.items()},
        delete_pods=tuple(pod for one in decided for pod in one.delete_pods),
        delete_tasks=over,
        plans={key: plan for one in decided for key, plan in one.plans.items()},
        plan_sizes={key: size for one in decided for key, size in one.plan_sizes.items()},
        texts={key: texts for one in decided for key, texts in one.texts.items()},
        events=(
            *(retry_event(task) for task in again.values() if task.key not in isolation.tasks),
            *(event for task in open_tasks for event in judged.news.get(task.key, ())),
            *_events(snapshot.pipelines, pipeline_statuses),
        ),
        unjudged=snapshot.unjudged,
        faults=isolation.faults,
    )


def _as_judged(task: Task, accepted: Mapping[Key, Acceptance], isolation: Isolation) -> Task:
    """With the priority that counts. One that is isolated and stays where it trains keeps its spec, which says its size."""
    found = accepted[task.key]
    if found.pipeline is None:
        return isolation.as_judged(task)
    return isolation.try_task(task, partial(as_counted, task, found), task)


def _applicants(
    demands: Mapping[Key, PipelineDemand], snapshot: Snapshot, isolation: Isolation, reach: Reach
) -> list[Applicant]:
    """Also of those that are isolated: others count on what they hold."""
    found = []
    for pipeline in snapshot.pipelines:
        if pipeline.deleting or pipeline.spec is None:
            continue
        demand = demands.get(pipeline.key)
        asks = (
            isolation.try_pipeline(pipeline, partial(applicant, demand.view, demand.wanting, reach), None)
            if demand is not None
            else None
        )
        found.append(asks or bystander(pipeline.key, snapshot.groups.get(pipeline.key)))
    return found


def _decide_one(
    pipeline: Pipeline,
    demand: PipelineDemand | None,
    tasks: Sequence[Task],
    may: Mapping[Key, GangTurn],
    judged: TaskStatuses,
    snapshot: Snapshot,
    plans: Memoized[Counted],
) -> Decision:
    """Of one that is isolated, that it does."""
    isolation, decided = judged.isolation, None
    if demand is not None and pipeline.key not in isolation.pipelines:
        turn = may.get(pipeline.key, GangTurn())
        decided = isolation.try_pipeline(
            pipeline, partial(_decide_pipeline, demand, turn, judged, snapshot, plans, judged.now), None
        )
    if decided is not None:
        return decided
    fault = isolation.pipelines[pipeline.key]
    return Decision(
        pipeline_statuses={pipeline.key: isolated_pipeline_status(pipeline, fault, judged.now)},
        task_statuses={task.key: judged.status_at(task, fault) for task in tasks},
    )


def _decide_pipeline(
    demand: PipelineDemand,
    turn: GangTurn,
    judged: TaskStatuses,
    snapshot: Snapshot,
    plans: Memoized[Counted],
    now: datetime,
) -> Decision:
    seen, placed, wanting = demand.view, demand.placed, demand.wanting
    key = seen.pipeline.key
    if seen.pipeline.spec is None:
        return Decision(pipeline_statuses={key: invalid_status(seen, now)})
    fares = health(seen, bool(wanting), turn.gathers or turn.given_back, now)
    wanted = size(seen, wanting, fares, turn, now)
    sources = Sources(snapshot.secrets, snapshot.config_maps, snapshot.texts_kept)
    planned = next_plan(seen, wanting, demand.ordered, placed, sources, plans, judged.isolation)
    plan = planned.plan
    generation = plan.generation if plan is not None else known_generation(seen) or None
    group = workers(seen, wanted)
    waiting = len([task for task in wanting if task.uid not in seen.active])
    here = pipeline_context(seen, fares, turn, now)
    rejected = plan_rejected(seen, planned.refused, planned.refusal)

    def status_of(task: Task) -> TaskStatus:
        if _is_unreadable(task, seen) or task.uid in seen.unjudged:
            return judged.unread(task)
        assert seen.pipeline.spec is not None
        reported = explained(task, seen.reported(task), seen.pipeline.spec, judged.policy)
        return judged.status(task, here, _place(task, seen, placed, planned), reported)

    return Decision(
        task_statuses={task.key: judged.of(task, partial(status_of, task)) for task in seen.tasks},
        pipeline_statuses={
            key: pipeline_status(seen, wanted, fares, turn, rejected, waiting, generation, now)
        },
        workers={key: group} if group is not None else {},
        delete_pods=pods_to_delete(seen, fares),
        plans={key: plan} if plan is not None else {},
        plan_sizes={key: planned.size} if plan is not None else {},
        texts={key: planned.texts} if planned.texts else {},
    )


def _place(
    task: Task, seen: PipelineView, placed: Mapping[str, Admission], planned: Planned
) -> Admission | None:
    """Where it is not in the plan that the workers have, that counts, unless it could not be admitted anyway."""
    place = placed.get(task.uid)
    may = place is None or place.outcome is AdmissionOutcome.ADMITTED
    if task.uid in planned.refused and may and task.uid not in seen.active:
        return Admission(AdmissionOutcome.NOT_UNDERSTOOD, words=planned.refused[task.uid])
    if planned.refusal is not None and may and not seen.contact.sent_admissions.get(task.uid):
        return place if task.uid in seen.active else _NOT_SENT
    return placed.get(task.uid, _NOT_IN_PLAN) if task.uid in planned.over else place


def _is_unreadable(task: Task, seen: PipelineView) -> bool:
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


def _replicas(
    shared: Iterable[ReplicaFamily], snapshot: Snapshot, isolation: Isolation
) -> tuple[Manifest, ...]:
    nothing: tuple[Manifest, ...] = ()
    each = (isolation.try_pipeline(one.head, partial(to_make, (one,), snapshot), nothing) for one in shared)
    return tuple(made for manifests in each for made in manifests)


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
