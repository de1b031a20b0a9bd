"""All workers of a group or none: a group that cannot get all of its pods gives back those that it has. Pure.

A quota or a full cluster may let some ranks start and not the others. Those that did would hold their devices and wait,
perhaps for the very device that another such group holds. All that is remembered is in the pipelines' statuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from mlora_operator.api.meta import timestamp
from mlora_operator.api.pipeline_status import StartSeen
from mlora_operator.api.units import parse_duration
from mlora_operator.reconcile.admission.pipeline_view import PipelineView
from mlora_operator.reconcile.state.decode import not_ahead, parse_time
from mlora_operator.reconcile.state.snapshot import Key, Task, WorkerGroup
from mlora_operator.reconcile.workers.health import is_of_now
from mlora_operator.scheduling.order import Candidate, between_namespaces

GIVE_WAY = timedelta(seconds=30)  # that a group may keep what an older demand's group lacks
FIRST_PAUSE = timedelta(minutes=1)  # before all workers are started again; it doubles
LONGEST_PAUSE = timedelta(minutes=15)
WORDS_LIMIT = 1024  # characters of a refusal that are kept in the status
REFUSED = "FailedCreate"  # the StatefulSet's pods are not made; workers that restart have another reason
# What keeps a container from its first start. One that started and ended is a failure instead (see ``health``).
UNSTARTABLE = frozenset(
    {
        "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
        "RegistryUnavailable", "CreateContainerConfigError",
    }
)  # fmt: skip


class Lack(StrEnum):
    """What is missing. Other groups can give the first two, by ending."""

    QUOTA = "Quota"  # of the namespace
    ROOM = "Room"  # on the nodes
    OTHER = "Other"  # an image, a label of a node, a right

    @classmethod
    def _missing_(cls, value: object) -> Lack:  # noqa: ARG003 - the base class's signature
        """What a newer operator may have written into a status."""
        return cls.OTHER


class Shortage(NamedTuple):
    lack: Lack
    words: str  # of the quota, the scheduler or the kubelet


@dataclass(frozen=True, slots=True)
class Applicant:
    """A group, and what it got of what it asks for."""

    pipeline: Key
    stages: int
    patience: timedelta  # spec.startTimeout; 0: what it got is never given back
    first: Candidate | None  # of the tasks that want it, the one that goes first; None: no task wants it
    asked: int = 0  # pods that its StatefulSet shall have now
    pods: int = 0  # that exist, those that are ending with them
    workers: int = 0  # that exist and are to stay
    placed: int = 0  # of these, have a node
    ready: int = 0
    refusal: Shortage | None = None
    record: StartSeen | None = None

    @property
    def lack(self) -> Lack | None:
        """What it lacks, or lacked when it was last refused."""
        if self.refusal is not None:
            return self.refusal.lack
        return Lack(self.record.lack) if self.record is not None and self.record.lack else None

    @property
    def settled(self) -> bool:
        """It has all it asked for, or is on its way out of that: whoever waits counts on what it will free."""
        if self.refusal is not None:
            return False
        return self.placed >= self.stages if self.asked else self.record is None

    @property
    def holds(self) -> bool:
        """It has something that it cannot use, or that a new attempt would get sooner than the controller's own, which
        come at ever longer intervals. Pods without a node hold nothing, and a cluster that grows on demand needs them.
        """
        if self.refusal is None:
            return False
        return self.placed > 0 or self.refusal.lack is Lack.QUOTA


@dataclass(frozen=True, slots=True)
class GangTurn:
    """What a group may do. ``record`` is to be remembered."""

    record: StartSeen | None = None
    gathers: bool = False  # it still lacks workers, and tries to get them
    given_back: bool = False  # it has to have no worker for now
    yields: bool = False  # nobody wants it, and what it holds would help another


Reach = Callable[[str], int | None]  # of a namespace, up to where its tasks' priorities count beside others'


def turns(
    applicants: Iterable[Applicant], now: datetime, reach: Reach = lambda _: None
) -> Mapping[Key, GangTurn]:
    """What each group may do now, the older demand first: that of the task that goes first in ``between_namespaces``.

    1. A group that nobody wants goes at once when another one lacks what it holds.
    2. A group that is refused some of its workers keeps the others for ``startTimeout``; only for GIVE_WAY when an older
       demand's group lacks the same. Then it gives all back.
    3. A group that gave back starts again when workers of another group ended, or after a pause that doubles with each
       attempt; never while an older demand's group gathers what both lack.
    4. Once all its workers are ready, nothing of this is remembered.

    A group that fits is never held up for an older one that does not: idle devices would help nobody.
    """
    everyone = tuple(applicants)
    wanted = [one for one in everyone if one.first is not None]
    outcome = {
        one.pipeline: GangTurn(yields=any(_would_help(one, other) for other in wanted))
        for one in everyone
        if one.first is None
    }
    before: list[Applicant] = []
    for one in _in_line(wanted, reach):
        contested = any(_compete(one, older) for older in before)
        turn = _turn(one, _held_by_others(one, everyone), contested, now)
        outcome[one.pipeline] = turn
        if turn.gathers:
            before.append(one)
    return outcome


def _in_line(wanted: Iterable[Applicant], reach: Reach) -> list[Applicant]:
    """In the order of the tasks that want them; a task wants one pipeline only."""
    by_task = {one.first.uid: one for one in wanted if one.first is not None}
    firsts = (one.first for one in by_task.values() if one.first is not None)
    return [by_task[task.uid] for task in between_namespaces(firsts, reach)]


def _turn(one: Applicant, others: int, contested: bool, now: datetime) -> GangTurn:
    record = one.record
    if one.ready >= one.stages:
        return GangTurn()
    if record is not None and record.again is not None:
        freed = one.lack is not Lack.OTHER and others < record.others
        wait = parse_time(record.again) - now
        over = not timedelta() < wait <= LONGEST_PAUSE  # more than that, a clock was ahead
        if contested or not (freed or over):
            return GangTurn(record.model_copy(update={"others": max(others, record.others)}), given_back=True)
        return GangTurn(record.model_copy(update={"again": None, "since": None}), gathers=True)
    if one.refusal is None:
        return GangTurn(record, gathers=record is not None and one.placed < one.stages)
    record = record or StartSeen()
    record = record.model_copy(
        update={
            "since": not_ahead(record.since, now) or timestamp(now),
            "lack": one.refusal.lack.value,
            "words": one.refusal.words[:WORDS_LIMIT],
        }
    )
    patience = min(one.patience, GIVE_WAY) if contested else one.patience
    if not one.patience or not one.holds or now - parse_time(record.since or "") < patience:
        return GangTurn(record, gathers=True)
    pause = min(FIRST_PAUSE * 2 ** min(record.attempts, 10), LONGEST_PAUSE)
    given_back = {"attempts": record.attempts + 1, "again": timestamp(now + pause), "others": others}
    return GangTurn(record.model_copy(update=given_back), given_back=True)


def _compete(one: Applicant, older: Applicant) -> bool:
    """Both lack what the other might have."""
    scarce = (Lack.QUOTA, Lack.ROOM)
    if one.lack not in scarce or older.lack not in scarce:
        return False
    return one.pipeline.namespace == older.pipeline.namespace or one.lack is older.lack is Lack.ROOM


def _would_help(idle: Applicant, other: Applicant) -> bool:
    """The quota is the namespace's, the room on the nodes everybody's."""
    if not idle.workers or other.ready >= other.stages:
        return False
    same = idle.pipeline.namespace == other.pipeline.namespace
    return other.lack is Lack.ROOM or (other.lack is Lack.QUOTA and same)


def _held_by_others(one: Applicant, everyone: tuple[Applicant, ...]) -> int:
    """Workers of groups that have all they asked for: when these are fewer, something was freed."""
    near = one.pipeline.namespace if one.lack is Lack.QUOTA else None
    return sum(
        other.pods
        for other in everyone
        if other.pipeline != one.pipeline and other.settled and near in (None, other.pipeline.namespace)
    )


# --- from a view ---


def bystander(pipeline: Key, group: WorkerGroup | None) -> Applicant:
    """Of a pipeline about which nothing else can be said: it wants nothing, and has what it has."""
    pods = group.pods if group is not None else ()
    staying = [pod for pod in pods if not pod.deleting]
    return Applicant(
        pipeline=pipeline,
        stages=group.replicas if group is not None else 1,
        patience=timedelta(),
        first=None,
        asked=group.replicas if group is not None else 0,
        pods=len(pods),
        workers=len(staying),
        placed=sum(pod.placed for pod in staying),
        ready=sum(pod.ready for pod in staying),
    )


def applicant(view: PipelineView, wanting: tuple[Task, ...], reach: Reach = lambda _: None) -> Applicant:
    """A pipeline's group as an applicant; ``wanting``: the tasks for which it runs."""
    spec, status, group = view.pipeline.spec, view.pipeline.status, view.group
    assert spec is not None
    pods = group.pods if group is not None else ()
    staying = [pod for pod in pods if not pod.deleting]
    return Applicant(
        pipeline=view.pipeline.key,
        stages=spec.stages,
        patience=parse_duration(spec.start_timeout),
        first=next(iter(between_namespaces((task.candidate for task in wanting), reach)), None),
        asked=group.replicas if group is not None else 0,
        pods=len(pods),
        workers=len(staying),
        placed=sum(pod.placed for pod in staying),
        ready=sum(pod.ready for pod in staying),
        refusal=_refusal(view),
        record=status.start if is_of_now(view) else None,  # else it is another demand
    )


def _refusal(view: PipelineView) -> Shortage | None:
    group = view.group
    if group is None or not group.replicas:
        return None
    if group.problem is not None and group.problem.reason == REFUSED:
        quota = "exceeded quota" in group.problem.message
        return Shortage(Lack.QUOTA if quota else Lack.OTHER, group.problem.message)
    for pod in group.pods:
        problem = pod.problem
        if problem is None or pod.deleting:
            continue
        words = f"pod {pod.key.name}: {problem}"
        if problem.reason == "Unschedulable":
            full = "Insufficient" in problem.message or "Too many pods" in problem.message
            return Shortage(Lack.ROOM if full else Lack.OTHER, words)
        if problem.reason in UNSTARTABLE:
            return Shortage(Lack.OTHER, words)
    return None


def given_back_message(view: PipelineView, record: StartSeen) -> str:
    """What a group that gave its workers back waits for."""
    assert view.pipeline.spec is not None
    spec = view.pipeline.spec
    return (
        f"not all of its {spec.stages} workers could be scheduled, so all were stopped: {record.words.rstrip('.')}; "
        f"it starts again automatically when workers of another pipeline have ended, or at {record.again}"
    )
