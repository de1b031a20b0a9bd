"""Who is admitted to a pipeline's memory: the scheduler asked about real tasks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from mlora_operator.api.pipeline import LoRAPipelineSpec, NamespaceLimits, Scheduling
from mlora_operator.api.priorities import HIGHEST
from mlora_operator.api.units import parse_duration
from mlora_operator.memory.scheduler_memory import SchedulerMemory
from mlora_operator.reconcile.admission.capacity import fresh_memory, known_memory
from mlora_operator.reconcile.admission.pipeline_view import PipelineView
from mlora_operator.reconcile.admission.queue import Queue, Queues, fresh_queue, queue_of
from mlora_operator.reconcile.admission.quota import held_up
from mlora_operator.reconcile.admission.workload import candidate, policy_of
from mlora_operator.reconcile.memoize import Memoized
from mlora_operator.reconcile.state.snapshot import Task
from mlora_operator.scheduling.admission import Admission, AdmissionOutcome
from mlora_operator.scheduling.entrant import EntrantState
from mlora_operator.scheduling.memory import CheckBeside
from mlora_operator.scheduling.order import between_namespaces, in_order
from mlora_operator.scheduling.schedule import schedule
from mlora_operator.scheduling.standstill import NO_TIME, holds_for

_ADMITTED = Admission(AdmissionOutcome.ADMITTED)
_SUSPENDED = Admission(AdmissionOutcome.SUSPENDED)

Scheduler = Callable[..., Mapping[str, Admission]]


@dataclass(frozen=True, slots=True)
class _Decided:
    """Places, and what they follow from."""

    era: object  # of the queue
    memory: SchedulerMemory
    scheduling: Scheduling
    limits: NamespaceLimits
    now: datetime
    holds: timedelta  # from ``now`` on
    admissions: Mapping[str, Admission]

    def still_holds(
        self, read: Queue, memory: SchedulerMemory, spec: LoRAPipelineSpec, now: datetime
    ) -> bool:
        return (
            self.era is read.era
            and self.memory.says_the_same_as(memory)
            and NO_TIME <= now - self.now < self.holds
            and (self.scheduling is spec.scheduling or self.scheduling == spec.scheduling)
            and (self.limits is spec.namespace_limits or self.limits == spec.namespace_limits)
        )


@dataclass
class AdmissionMemo:
    """What decisions have worked out of each pipeline, by its uid. An answer never depends on it."""

    queues: Queues = field(default_factory=Memoized)
    memories: Memoized[SchedulerMemory] = field(default_factory=Memoized)
    decided: Memoized[_Decided] = field(default_factory=Memoized)

    def turn(self) -> None:
        """A decision begins."""
        for each in (self.queues, self.memories, self.decided):
            each.turn()


def admissions(
    view: PipelineView, now: datetime, known: AdmissionMemo, scheduler: Scheduler = schedule
) -> Mapping[str, Admission]:
    """See ``fresh_admissions``: the same; and the very same object as long as nothing has happened in the pipeline but that
    tasks train on (``standstill``), which is so for most pipelines in most decisions.
    """
    spec, uid = view.pipeline.spec, view.pipeline.uid
    assert spec is not None
    read = queue_of(view, known.queues)
    if view.shape is None:
        return _unjudged(read)
    memory = known_memory(view, view.shape, read.demands, known.memories)
    before = known.decided.last(uid)
    if before is not None and before.still_holds(read, memory, spec, now):
        return before.admissions
    found, holds = _judged(view, read, memory, now, scheduler)
    decided = _Decided(read.era, memory, spec.scheduling, spec.namespace_limits, now, holds, found)
    known.decided.keep(uid, (), decided)
    return found


def fresh_admissions(
    view: PipelineView, now: datetime, scheduler: Scheduler = schedule
) -> Mapping[str, Admission]:
    """The admission of each task that the scheduler can speak of, by uid.

    Nobody new is let in before the workers have told the model's shape. A task is let in once its rows are
    prepared, so that a slow or broken dataset holds no memory; one that can never fit the memory or the model is told
    so before that, and no worker is started for it where the shape is still known from a former run.

    A suspended task is spoken of as long as it holds memory: it leaves like one that is preempted.
    """
    read = fresh_queue(view)
    if view.shape is None:
        return _unjudged(read)
    found, _ = _judged(view, read, fresh_memory(view, view.shape, read.demands), now, scheduler)
    return found


def _unjudged(read: Queue) -> Mapping[str, Admission]:
    inside = [one.uid for one in read.entrants if one.state is not EntrantState.WAITING]
    return {uid: _SUSPENDED if uid in read.suspended else _ADMITTED for uid in inside}


def _judged(
    view: PipelineView, read: Queue, memory: SchedulerMemory, now: datetime, scheduler: Scheduler
) -> tuple[Mapping[str, Admission], timedelta]:
    """The admissions, and for how long they hold (``standstill``)."""
    spec = view.pipeline.spec
    assert spec is not None
    hold_back, policy = parse_duration(spec.scheduling.hold_back), policy_of(view, spec.scheduling, now)
    most = spec.namespace_limits.training
    over = held_up(read.entrants, most)
    entrants = tuple(one for one in read.entrants if one.uid not in over) if over else read.entrants
    outcome = scheduler(entrants, memory, policy, now, hold_back)
    suspended = {
        uid: _SUSPENDED for uid in read.suspended if outcome[uid].outcome is AdmissionOutcome.PREEMPTED
    }
    never = {
        uid: Admission(AdmissionOutcome.NEVER_FITS, CheckBeside(memory, memory.held(()), uid))
        for uid in read.unready
        if not memory.fits_alone(uid)
    }
    refused = {
        uid: Admission(AdmissionOutcome.REFUSED, failure=failure) for uid, failure in read.refused.items()
    }
    limited = {uid: Admission(AdmissionOutcome.WAITING, limit=most) for uid in over}
    holds = holds_for(entrants, outcome, now, hold_back) if policy.steady else NO_TIME
    return {**outcome, **limited, **suspended, **never, **refused}, holds


def ordered(tasks: Iterable[Task], scheduling: Scheduling) -> tuple[Task, ...]:
    """Tasks by priority and age; where a pipeline shares fairly, no priority reaches another namespace."""
    by_uid = {task.uid: task for task in tasks}
    candidates = (candidate(task) for task in by_uid.values())
    if scheduling.policy == "fairShare":
        return tuple(by_uid[one.uid] for one in between_namespaces(candidates, lambda _: -HIGHEST))
    return tuple(by_uid[one.uid] for one in in_order(candidates))
