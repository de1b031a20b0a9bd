"""All unfinished tasks judged together: what one may have depends on what others have. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from mlora_operator.api import conditions
from mlora_operator.reconcile.assignment.cache import AssignmentCache
from mlora_operator.reconcile.assignment.eligibility import Suits, accept
from mlora_operator.reconcile.assignment.output_claims import OutputClaims
from mlora_operator.reconcile.assignment.output_conflicts import misplaced, settle
from mlora_operator.reconcile.assignment.priority_bounds import counted, too_high
from mlora_operator.reconcile.assignment.queue_limits import within_queues
from mlora_operator.reconcile.state.acceptance import Acceptance
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.endpoint_policy import forbidden
from mlora_operator.reconcile.state.isolation import Isolation
from mlora_operator.reconcile.state.serving import ServedModels
from mlora_operator.reconcile.state.snapshot import (
    ConfigMapText,
    Contact,
    Key,
    Pipeline,
    SecretData,
    Snapshot,
    Task,
    WorkerGroup,
)
from mlora_operator.settings import Settings


def acceptances(
    open_tasks: Sequence[Task],
    snapshot: Snapshot,
    settings: Settings,
    memo: AssignmentCache,
    suits: Suits,
    isolation: Isolation,
) -> Mapping[Key, Acceptance]:
    """1. Whether and where each is served (``accept``).
    2. Its addresses lead nowhere that only the worker can reach; one that trains or has just ended is left in peace.
    3. Its output is a place where it may write, in the same way (``outputs.misplaced``).
    4. Its priority is one that its namespace may have there (``priority_bounds``); that of one that trains counts for no
       more.
    5. Its output is its own (``outputs.settle``).
    6. Its namespace's queue there has room for it (``limits``).

    One about which that cannot be said is isolated, and is judged as one whose spec is not understood.
    """
    judge = _Judge(snapshot, settings, memo, suits, isolation)
    found = {task.key: judge.acceptance(task) for task in open_tasks}
    open_keys = {task.key: task for task in open_tasks}
    everyone = [open_keys.get(task.key, task) for task in snapshot.tasks]

    def together(work: Callable[..., dict[Key, Acceptance]], tasks: Sequence[Task]) -> dict[Key, Acceptance]:
        """What ``work`` makes of all that was ``found``, without those with which it raises."""
        try:
            return work(found, tasks)
        except Exception:
            odd = isolation.isolate_culprits(tasks, lambda some: work(found, some, OutputClaims()))
            if not odd:
                raise
        memo.claims = OutputClaims()
        apart = {task.key: judge.isolated(task) for task in open_tasks if task.key in odd}
        return work(found | apart, [task for task in tasks if task.key not in odd])

    def claimed(
        found: Mapping[Key, Acceptance], tasks: Sequence[Task], claims: OutputClaims | None = None
    ) -> dict[Key, Acceptance]:
        claims = memo.claims if claims is None else claims
        return settle(found, tasks, snapshot.pipelines, snapshot.contacts, settings.rights, claims)

    def queued(found: Mapping[Key, Acceptance], tasks: Sequence[Task], *_: object) -> dict[Key, Acceptance]:
        return within_queues(found, tasks, snapshot.contacts)

    found = together(claimed, everyone)
    return together(queued, open_tasks)


class _Surroundings(NamedTuple):
    """What the first four rules read beside a task and the phases in which it is reported, where one pipeline alone may
    serve it. Of pipelines: all but the rest of their statuses; of coordinators: which have not been heard."""

    settings: Settings
    pipelines: tuple[tuple[Any, ...], ...]
    groups: Mapping[Key, WorkerGroup]
    unheard: frozenset[Key]
    secrets: Mapping[Key, SecretData | None]
    config_maps: Mapping[Key, Mapping[str, ConfigMapText] | None]
    labels: Mapping[str, Mapping[str, str]]
    unread: Mapping[tuple[str, Key], str]
    later: frozenset[tuple[str, Key]]


def _surroundings(snapshot: Snapshot, settings: Settings) -> _Surroundings:
    return _Surroundings(
        settings,
        tuple(
            (one.key, one.uid, one.spec, one.deleting, one.replica, one.catalogue_hash)
            for one in snapshot.pipelines
        ),
        snapshot.groups,
        frozenset(key for key, contact in snapshot.contacts.items() if contact.report is None),
        snapshot.secrets,
        snapshot.config_maps,
        snapshot.namespace_labels,
        snapshot.unread,
        snapshot.later,
    )


# Of a new task that nobody has looked into yet: its status stays as it is.
_LATER = Acceptance(Cause(conditions.REASON_ACCEPTED, "the operator has not processed it yet"), held=True)


class _Judge:
    """The first four rules, from what is known as far as it holds. Where several pipelines may serve a task, what matters
    is how they fare: nothing is remembered then."""

    def __init__(
        self,
        snapshot: Snapshot,
        settings: Settings,
        memo: AssignmentCache,
        suits: Suits,
        isolation: Isolation,
    ) -> None:
        self._snapshot, self._settings, self._known = snapshot, settings, memo.acceptances
        self._rights = settings.rights
        self._isolation, self._suits = isolation, suits
        self._served = ServedModels(snapshot.pipelines, snapshot.namespace_labels, settings.rights)
        self._pipelines = {one.key: one for one in snapshot.pipelines}
        now = _surroundings(snapshot, settings)
        if memo.surroundings != now:
            memo.surroundings = now
        self._around = memo.surroundings  # the same object as long as it says the same
        self._heard = _heard(snapshot.contacts)
        self._serve = Counter(
            one.spec.model.name
            for one in snapshot.pipelines
            if one.spec is not None and one.replica is None and not one.deleting
        )

    def acceptance(self, task: Task) -> Acceptance:
        found = None
        if task.key not in self._isolation.tasks:
            found = self._isolation.try_task(task, partial(self._acceptance, task), None)
        isolated = (
            found is None or task.key in self._isolation.tasks
        )  # also by what only notes that it raises
        return self.isolated(task) if isolated or found is None else found

    def isolated(self, task: Task) -> Acceptance:
        """Of one that is isolated: it stays where it trains, and is not accepted anywhere else."""
        try:
            return self._made(self._isolation.as_judged(task))
        except Exception:
            bound = next(
                (one for one in self._pipelines.values() if str(one.key) == task.status.pipeline), None
            )
            stays = bound is not None and self._stays(task, bound)
            return Acceptance(
                Cause(conditions.REASON_RECONCILE_ERROR, ""), bound if stays else None, held=not stays
            )

    def _stays(self, task: Task, bound: Pipeline) -> bool:
        """Where not even that can be said, its pipeline is left as it is: without its place it would be unloaded."""
        try:
            return self._snapshot.contacts.get(bound.key, Contact()).keeps(task)
        except Exception as error:
            self._isolation.isolate_pipeline(bound, error)
            return True

    def _acceptance(self, task: Task) -> Acceptance:
        heard, wrong = self._heard.get(task.uid), self._snapshot.wrong.get(task.uid)
        if task.uid in self._snapshot.unjudged and not task.accepted and heard is None:
            return _LATER
        if (
            task.spec is None and heard is None and not task.status.pipeline
        ):  # nothing beside the task matters
            return self._known.known(task.uid, (task,)) or self._known.keep(
                task.uid, (task,), self._made(task)
            )
        if task.spec is None or self._serve[task.spec.base_model] > 1:
            return self._made(task)
        made_of = (task, self._around, heard, wrong)
        known = self._known.known(task.uid, made_of)
        if known is None:
            return self._known.keep(task.uid, made_of, self._made(task))
        now = self._pipelines[known.pipeline.key] if known.pipeline is not None else None
        if known.pipeline is now:
            return known
        return self._known.keep(task.uid, made_of, replace(known, pipeline=now))

    def _made(self, task: Task) -> Acceptance:
        settings = self._settings
        found = accept(task, self._snapshot, settings.models, self._rights, self._suits, self._served)
        if found.pipeline is None and found.wanted is None:
            return found
        if found.pipeline is not None and self._keeps(task, found.pipeline):
            return counted(task, found, self._rights)
        problem = None if settings.allow_private_endpoints else _unreachable(task, found)
        problem = problem or misplaced(task, self._rights) or too_high(task, found, self._rights)
        return Acceptance(problem) if problem is not None else found

    def _keeps(self, task: Task, pipeline: Pipeline) -> bool:
        return task.spec is None or self._snapshot.contacts.get(pipeline.key, Contact()).keeps(task)


def _heard(contacts: Mapping[Key, Contact]) -> Mapping[str, tuple[Any, ...]]:
    """By task's uid: which coordinators speak of it, and in which phase it is there."""
    heard: dict[str, tuple[Any, ...]] = {}
    for key, contact in contacts.items():
        for uid, report in contact.tasks.items():
            heard[uid] = (*heard[uid], key, report.phase) if uid in heard else (key, report.phase)
    return heard


def _unreachable(task: Task, found: Acceptance) -> Cause | None:
    """Asked again once a pipeline that is being made is there."""
    spec = found.pipeline.spec if found.pipeline is not None else None
    if spec is None or task.spec is None:
        return None
    problem = forbidden(task.spec, spec.worker.allowed_networks)
    return Cause(conditions.REASON_ENDPOINT_NOT_ALLOWED, problem) if problem is not None else None
