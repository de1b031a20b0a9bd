"""Who has a place in a pipeline's memory: the scheduler asked about real tasks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from mlora_operator.api.pipeline import LoRAPipelineSpec, NamespaceLimits, Scheduling
from mlora_operator.api.priorities import HIGHEST
from mlora_operator.api.units import parse_duration
from mlora_operator.memory.room import ModelRoom
from mlora_operator.reconcile.admission.capacity import fresh_room, known_room
from mlora_operator.reconcile.admission.pipeline_view import View
from mlora_operator.reconcile.admission.queue import Roster, Rosters, fresh_roster, roster
from mlora_operator.reconcile.admission.quota import held_up
from mlora_operator.reconcile.admission.workload import candidate, policy_of
from mlora_operator.reconcile.memoize import Answers, Latest
from mlora_operator.reconcile.state.snapshot import Task
from mlora_operator.scheduling.admission import Outcome, Place
from mlora_operator.scheduling.entrant import State
from mlora_operator.scheduling.order import between_namespaces, in_order
from mlora_operator.scheduling.room import Beside
from mlora_operator.scheduling.schedule import schedule
from mlora_operator.scheduling.standstill import NO_TIME, holds_for

_ADMITTED = Place(Outcome.ADMITTED)
_SUSPENDED = Place(Outcome.SUSPENDED)

Scheduler = Callable[..., Mapping[str, Place]]


@dataclass(frozen=True, slots=True)
class _Decided:
    """Places, and what they follow from."""

    era: object  # of the roster
    room: ModelRoom
    scheduling: Scheduling
    limits: NamespaceLimits
    now: datetime
    holds: timedelta  # from ``now`` on
    places: Mapping[str, Place]

    def still_holds(self, read: Roster, room: ModelRoom, spec: LoRAPipelineSpec, now: datetime) -> bool:
        return (
            self.era is read.era
            and self.room.says_the_same_as(room)
            and NO_TIME <= now - self.now < self.holds
            and (self.scheduling is spec.scheduling or self.scheduling == spec.scheduling)
            and (self.limits is spec.namespace_limits or self.limits == spec.namespace_limits)
        )


@dataclass
class Known:
    """What decisions have worked out of each pipeline, by its uid. An answer never depends on it."""

    rosters: Rosters = field(default_factory=Latest)
    rooms: Answers[ModelRoom] = field(default_factory=Answers)
    decided: Latest[_Decided] = field(default_factory=Latest)

    def turn(self) -> None:
        """A decision begins."""
        for each in (self.rosters, self.rooms, self.decided):
            each.turn()


def places(view: View, now: datetime, known: Known, scheduler: Scheduler = schedule) -> Mapping[str, Place]:
    """See ``fresh_places``: the same; and the very same object as long as nothing has happened in the pipeline but that
    tasks train on (``standstill``), which is so for most pipelines in most decisions.
    """
    spec, uid = view.pipeline.spec, view.pipeline.uid
    assert spec is not None
    read = roster(view, known.rosters)
    if view.shape is None:
        return _unjudged(read)
    room = known_room(view, view.shape, read.demands, known.rooms)
    before = known.decided.of(uid)
    if before is not None and before.still_holds(read, room, spec, now):
        return before.places
    found, holds = _judged(view, read, room, now, scheduler)
    known.decided.keep(
        uid, _Decided(read.era, room, spec.scheduling, spec.namespace_limits, now, holds, found)
    )
    return found


def fresh_places(view: View, now: datetime, scheduler: Scheduler = schedule) -> Mapping[str, Place]:
    """The place of each task that the scheduler can speak of, by uid.

    Nobody new is let in before the workers have told the model's shape. A task is let in once its rows are
    prepared, so that a slow or broken dataset holds no memory; one that can never fit the memory or the model is told
    so before that, and no worker is started for it where the shape is still known from a former run.

    A suspended task is spoken of as long as it holds memory: it leaves like one that is preempted.
    """
    read = fresh_roster(view)
    if view.shape is None:
        return _unjudged(read)
    found, _ = _judged(view, read, fresh_room(view, view.shape, read.demands), now, scheduler)
    return found


def _unjudged(read: Roster) -> Mapping[str, Place]:
    inside = [one.uid for one in read.entrants if one.state is not State.WAITING]
    return {uid: _SUSPENDED if uid in read.suspended else _ADMITTED for uid in inside}


def _judged(
    view: View, read: Roster, room: ModelRoom, now: datetime, scheduler: Scheduler
) -> tuple[Mapping[str, Place], timedelta]:
    """The places, and for how long they hold (``standstill``)."""
    spec = view.pipeline.spec
    assert spec is not None
    hold_back, policy = parse_duration(spec.scheduling.hold_back), policy_of(view, spec.scheduling, now)
    most = spec.namespace_limits.training
    over = held_up(read.entrants, most)
    entrants = tuple(one for one in read.entrants if one.uid not in over) if over else read.entrants
    outcome = scheduler(entrants, room, policy, now, hold_back)
    suspended = {uid: _SUSPENDED for uid in read.suspended if outcome[uid].outcome is Outcome.PREEMPTED}
    never = {
        uid: Place(Outcome.NEVER_FITS, Beside(room, room.held(()), uid))
        for uid in read.unready
        if not room.fits_alone(uid)
    }
    refused = {uid: Place(Outcome.REFUSED, failure=failure) for uid, failure in read.refused.items()}
    limited = {uid: Place(Outcome.WAITING, limit=most) for uid in over}
    holds = holds_for(entrants, outcome, now, hold_back) if policy.steady else NO_TIME
    return {**outcome, **limited, **suspended, **never, **refused}, holds


def ordered(tasks: Iterable[Task], scheduling: Scheduling) -> tuple[Task, ...]:
    """Tasks by priority and age; where a pipeline shares fairly, no priority reaches another namespace."""
    by_uid = {task.uid: task for task in tasks}
    candidates = (candidate(task) for task in by_uid.values())
    if scheduling.policy == "fairShare":
        return tuple(by_uid[one.uid] for one in between_namespaces(candidates, lambda _: -HIGHEST))
    return tuple(by_uid[one.uid] for one in in_order(candidates))
