"""Pipelines that share the tasks of one: how many there are, and which of them has which task. Pure.

A replica is a LoRAPipeline of its own, so it has its own workers, memory, queue and status. Users speak to the pipeline
that they made; its tasks are dealt to the replicas. Nothing is remembered: where a task is, its status says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import ceil

from mlora_operator.api import conditions
from mlora_operator.api.pipeline import Replicas
from mlora_operator.manifests.names import replica_name
from mlora_operator.manifests.owner import Owner
from mlora_operator.manifests.replica import replica_hash, replica_manifest
from mlora_operator.reconcile.admission.admit import ordered
from mlora_operator.reconcile.assignment.fit import FreeMemory, PipelineMemories
from mlora_operator.reconcile.state.acceptance import Acceptance
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.decision import Manifest
from mlora_operator.reconcile.state.isolation import Isolation
from mlora_operator.reconcile.state.snapshot import (
    Contact,
    Key,
    Pipeline,
    Snapshot,
    Task,
    WorkerGroup,
    condition,
)
from mlora_worker.protocol import TaskPhase

# A waiting task moves only where it has at least two fewer before it: to move costs that its rows are prepared again.
SLACK = 1
# Part of a replica's share of tasks that must be free before there is one replica fewer.
SPARE = 0.25


@dataclass(frozen=True, slots=True)
class ReplicaFamily:
    """A pipeline with its replicas: ``members[0]`` is the pipeline itself, then by number. ``open``: how many of them, from
    the first on, take tasks."""

    members: tuple[Pipeline, ...]
    open: int

    @property
    def head(self) -> Pipeline:
        return self.members[0]


def wanted(replicas: Replicas, there: int, unfinished: int) -> int:
    """Members for so many unfinished tasks, where so many members are there now."""
    share = replicas.tasks_per_replica
    enough = ceil(unfinished / share)
    if enough < there:
        enough = min(there, ceil((unfinished + SPARE * share) / share))
    return max(replicas.min, min(replicas.max, enough))


def families(
    accepted: Mapping[Key, Acceptance], tasks: Sequence[Task], snapshot: Snapshot, isolation: Isolation
) -> tuple[ReplicaFamily, ...]:
    """Of the pipelines that have replicas, or may have some. ``accepted``: every task at its user's pipeline, or where it
    trains."""
    members = snapshot.replicas
    heads = [
        one
        for one in snapshot.pipelines
        if one.spec is not None and not one.deleting and one.replica is None
        if one.key in members or one.spec.replicas.max > 1
    ]
    if not heads:
        return ()
    unfinished: Counter[Key] = Counter()
    for task in tasks:
        pipeline = accepted[task.key].pipeline
        if pipeline is not None and isolation.try_task(task, partial(_counts, task), True):
            unfinished[pipeline.home] += 1
    found = []
    for head in heads:
        assert head.spec is not None
        own = sorted(members.get(head.key, ()), key=_number)
        open_ = wanted(head.spec.replicas, 1 + len(own), unfinished[head.key])
        found.append(ReplicaFamily((head, *own), open_))
    return tuple(found)


def dealt(
    accepted: Mapping[Key, Acceptance],
    tasks: Sequence[Task],
    own: Iterable[ReplicaFamily],
    snapshot: Snapshot,
    memories: PipelineMemories,
    isolation: Isolation,
) -> dict[Key, Acceptance]:
    """``accepted``, with each task at the member of the family where it shall be.

    1. A task that is admitted, or may be by the last that its coordinator was told, stays where it is; so does one
       whose checkpoints lie on a volume of that member alone, and a suspended one while that member takes tasks.
    2. The others are dealt in the scheduler's order, each to the member with the fewest tasks. One stays where it is unless
       another has at least two fewer; and also then, while nobody before it waits there and it fits.
    3. One that waits for memory, or for its namespace's turn, moves to a member where nobody waits and it fits.
    4. A member whose workers are not up gets one task, the last in order: it starts them, and nobody waits longer for that.
       Where no member's are, the first gets all others. One that is given up gets none.
    """
    found = dict(accepted)
    for family in map(_understood, own):
        keys = {one.key for one in family.members}
        mine = [task for task in tasks if (at := accepted[task.key].pipeline) is not None and at.key in keys]
        nobody: list[tuple[Task, Pipeline]] = []
        for task, member in isolation.try_pipeline(
            family.head, partial(_deal_apart, family, mine, snapshot, memories, isolation), nobody
        ):
            if member is not found[task.key].pipeline:
                former = found[task.key]
                cause = Cause(former.cause.reason, f"served by pipeline {member.key}")
                found[task.key] = replace(former, pipeline=member, cause=cause)
    return found


def _understood(family: ReplicaFamily) -> ReplicaFamily:
    """Without replicas whose spec somebody made wrong: they are put right (``to_make``), and take no tasks before."""
    members = [one.spec is not None for one in family.members]
    if all(members):
        return family
    understood = tuple(one for one in family.members if one.spec is not None)
    return ReplicaFamily(understood, sum(members[: family.open]))


def to_make(own: Iterable[ReplicaFamily], snapshot: Snapshot) -> tuple[Manifest, ...]:
    """Replicas that are missing, were made of a former spec, or that somebody made wrong. A pipeline of somebody else that
    has a replica's name is left alone, and the next number taken."""
    made = []
    for family in own:
        head = family.head
        assert head.spec is not None
        owner = Owner(head.key.namespace, head.key.name, head.uid)
        there = {
            one.replica.number: one.replica.hash if one.spec is not None else ""
            for one in family.members[1:]
            if one.replica is not None
        }
        taken = {one.key for one in snapshot.pipelines}
        free = (
            number
            for number in range(1, 100)
            if number in there or Key(owner.namespace, replica_name(owner.name, number)) not in taken
        )
        for number in islice(free, family.open - 1):
            if there.get(number) != replica_hash(head.spec):
                made.append(replica_manifest(owner, head.spec, number))
    return tuple(made)


def to_delete(
    own: Iterable[ReplicaFamily], accepted: Mapping[Key, Acceptance], snapshot: Snapshot
) -> tuple[Pipeline, ...]:
    """Replicas that are not wanted any more, have no task, and whose workers are gone."""
    used = {one.pipeline.key for one in accepted.values() if one.pipeline is not None}
    return tuple(
        one
        for family in own
        for one in family.members[family.open :]
        if one.key not in used
        and ((group := snapshot.groups.get(one.key)) is None or (group.replicas == 0 and not group.pods))
    )


def _deal_apart(
    family: ReplicaFamily,
    tasks: Sequence[Task],
    snapshot: Snapshot,
    memories: PipelineMemories,
    isolation: Isolation,
) -> list[tuple[Task, Pipeline]]:
    """See ``dealt``. Tasks with which that raises are isolated, and stay where they are."""

    def work(some: Sequence[Task]) -> list[tuple[Task, Pipeline]]:
        return _deal(family, some, snapshot, memories)

    return isolation.try_together(tasks, work)


def _deal(
    family: ReplicaFamily, tasks: Sequence[Task], snapshot: Snapshot, memories: PipelineMemories
) -> list[tuple[Task, Pipeline]]:
    open_ = [one for one in family.members[: family.open] if one.status.given_up is None] or [family.head]
    load: Counter[Key] = Counter()
    placed: list[tuple[Task, Pipeline]] = []
    inside: list[tuple[Task, Pipeline]] = []  # who is, or may be, in a memory
    bound: dict[str, tuple[Task, Pipeline]] = {}  # who waits where its checkpoints are, and nowhere else
    free: dict[str, Task] = {}
    at_present = {task.uid: _member_of(task, family, snapshot.contacts) for task in tasks}
    for task in tasks:
        at = at_present[task.uid]
        if at is not None and _stays(task, at, snapshot.contacts.get(at.key, Contact()), snapshot):
            placed.append((task, at))
            load[at.key] += _counts(task)
            if _counts(task):
                inside.append((task, at))
        elif task.spec is None:
            placed.append((task, at or family.head))
        elif task.spec.suspend:  # one that is closed would wait for it for ever
            takes = at is not None and (at in family.members[: family.open] or _has_files(task, at))
            placed.append((task, at if at is not None and takes else family.head))
        elif not _counts(task):  # no workers start for it
            placed.append((task, at if at is not None and _has_files(task, at) else family.head))
        elif at is not None and _has_files(task, at):
            placed.append((task, at))
            load[at.key] += 1
            bound[task.uid] = task, at
        else:
            free[task.uid] = task
    up = [one for one in open_ if _is_up(snapshot.contacts.get(one.key, Contact()))] or open_[:1]
    assert family.head.spec is not None
    scheduling = family.head.spec.scheduling
    order = [*ordered(free.values(), scheduling)]
    idle = sum(not load[one.key] for one in up)
    for member in reversed([one for one in open_ if one not in up and not load[one.key]]):
        if len(order) <= idle:
            break  # whoever is up would have nothing to do
        own = (task for task in reversed(order) if at_present[task.uid] is member)
        scout = next(own, order[-1])
        order.remove(scout)
        placed.append((scout, member))
    rooms = FreeMemory(inside, memories)
    before: Counter[Key] = Counter()  # tasks that wait there and go first
    waiting = (*order, *(task for task, _ in bound.values()))
    for uid in (one.uid for one in ordered(waiting, scheduling)):
        if uid in bound:
            before[bound[uid][1].key] += 1
            continue
        task = free[uid]
        by_load = sorted(up, key=lambda one: (load[one.key], _number(one)))
        at = at_present[task.uid]

        def is_next(member: Pipeline, task: Task = task) -> bool:
            return not before[member.key] and rooms.has_room(member, task)

        if at is None or at not in up or (load[at.key] > load[by_load[0].key] + SLACK and not is_next(at)):
            at = by_load[0]
        elif _waits_for_room(task):
            at = next((one for one in by_load if one is not at and is_next(one)), at)
        load[at.key] += 1
        before[at.key] += 1
        placed.append((task, at))
    return placed


def _waits_for_room(task: Task) -> bool:
    held = task.admitted
    reasons = (conditions.REASON_WAITING_FOR_MEMORY, conditions.REASON_NAMESPACE_LIMIT_REACHED)
    return held is not None and held.status == "False" and held.reason in reasons


def _member_of(task: Task, family: ReplicaFamily, contacts: Mapping[Key, Contact]) -> Pipeline | None:
    """Where the task is now: who trains it, else who was told that it may, or else of it, else as its status says.
    A status may be written later than a plan is sent."""

    def holds(member: Pipeline) -> int:
        contact = contacts.get(member.key)
        if contact is None or contact.report is None:
            return 0
        if contact.keeps(task):
            return 3
        told = contact.sent_admissions.get(task.uid)
        if told is None and contact.sent is None and task.uid in contact.tasks:
            return 1  # a former operator told it
        return 0 if told is None else 2 if told else 1

    bound = next((one for one in family.members if str(one.key) == task.status.pipeline), None)
    best = max(family.members, key=lambda one: (holds(one), one is bound))
    return best if holds(best) else bound


def _stays(task: Task, at: Pipeline, contact: Contact, snapshot: Snapshot) -> bool:
    """Its coordinator may train it already, or has what no other one has."""
    if task.spec is None:
        return True
    group = snapshot.groups.get(at.key)
    runs = group is not None and any(
        pod.placed for pod in group.pods
    )  # those of a group that ends, to the end
    reported = contact.tasks.get(task.uid)
    if reported is not None and reported.phase in (TaskPhase.SUCCEEDED, TaskPhase.FAILED):
        return True
    if reported is not None and reported.phase is TaskPhase.PREEMPTED and task.status.run is not None:
        return True  # until its status says how far it came
    if runs and (contact.keeps(task) or contact.sent_admissions.get(task.uid)):
        return True
    if runs and group is not None:
        held = task.admitted
        return (held is not None and held.status == "True") or _may_begin(task, group, contact)
    return False


def _has_files(task: Task, at: Pipeline) -> bool:
    """Its checkpoints lie on a volume of that member alone."""
    assert at.spec is not None
    return bool(task.status.step) and (at.spec.checkpoints.uri or "").startswith("file://")


def _may_begin(task: Task, group: WorkerGroup, contact: Contact) -> bool:
    """Nothing excludes that a former plan lets the task begin: only a coordinator that took ours, and has reported since,
    cannot begin with what ours does not admit."""
    if contact.report is None:
        # It runs, and an operator that has just started has not heard it yet; or it ends, and nobody hears it any more.
        return any(pod.placed and (pod.ready or pod.deleting) for pod in group.pods)
    if contact.sent is None:
        return task.uid in contact.tasks
    return contact.live is None or contact.live.sequence <= contact.sent_sequence


def _is_up(contact: Contact) -> bool:
    return contact.live is not None and contact.live.ready


def _counts(task: Task) -> bool:
    """It wants workers: it is not suspended, and not known to be too large."""
    held = condition(task.status.conditions, conditions.ADMITTED)
    hopeless = held is not None and held.reason == conditions.REASON_EXCEEDS_CAPACITY
    return task.spec is not None and not task.spec.suspend and not hopeless


def _number(pipeline: Pipeline) -> int:
    return pipeline.replica.number if pipeline.replica is not None else 0
