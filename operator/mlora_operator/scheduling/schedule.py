"""Who gets a place in a pipeline's memory, who has to leave it, and who waits for what. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Generic

from mlora_operator.scheduling.admission import Outcome, Place
from mlora_operator.scheduling.entrant import STAYING, Entrant, State
from mlora_operator.scheduling.order import Candidate
from mlora_operator.scheduling.policy import Policy
from mlora_operator.scheduling.reservation import LOOKED_AT, earliest_round, is_over_by, rounds_left
from mlora_operator.scheduling.room import Held, Memory

HOLD_BACK = timedelta(minutes=10)
_MAY_LEAVE = (State.STARTING, State.RUNNING)  # one that starts is only told so once it has begun


def schedule(
    entrants: Iterable[Entrant],
    memory: Memory[Held],
    policy: Policy,
    now: datetime,
    hold_back: timedelta = HOLD_BACK,
) -> Mapping[str, Place]:
    """The place of each task, by uid. Deterministic: the same whichever way the tasks are listed.

    1. A task that starts, trains or saves keeps its place unless rule 5 takes it. One that leaves goes on leaving.
    2. A waiting task that does not fit even alone never will: it is told so and stands in nobody's way.
    3. The other waiting tasks are taken in the policy's order. One that fits beside all that have a place is admitted, as
       soon as it also fits beside those that are still leaving.
    4. One that fits but for those that are leaving gets their room: nobody after it does.
    5. For one that does not fit, running tasks after it in the order have to leave as far as the policy allows: the last
       first, until it fits; then those are spared again, the first first, beside whom it still fits. When it does not fit
       even so, nobody has to leave.
    6. One that still does not fit waits, and those after it may pass. Once it has waited for ``hold_back``, none may any
       more, but one that is done before it could begin at the earliest (``reservation``).
    """
    ordered = policy.order(tuple(entrants))
    room = _Room(memory, [one for one in ordered if one.state is not State.WAITING])
    held_back: list[Entrant] = []  # have waited long, in order
    gate = math.inf  # rounds until the first of them may begin
    places: dict[str, Place] = {}
    for position, one in enumerate(ordered):
        if one.state is not State.WAITING:
            continue
        alone = memory.held((one.uid,))
        if not memory.fits(alone):
            places[one.uid] = Place(Outcome.NEVER_FITS, memory.verdict(alone))
            continue
        passes = not held_back or is_over_by(one, gate)
        place = (room.admit(one) or room.make_room(one, ordered[position + 1 :], policy)) if passes else None
        if place is not None:
            places[one.uid] = place
            continue
        if passes:
            places[one.uid] = Place(Outcome.WAITING, memory.verdict(memory.plus(room.later, one.uid)))
        else:
            places[one.uid] = Place(Outcome.WAITING, behind=held_back[0].task)
        if now - one.since >= hold_back:
            held_back.append(one)
            gate = min(gate, room.begin(one, policy) if len(held_back) <= LOOKED_AT else room.first_end())
    return {**places, **room.of_those_inside()}


@dataclass
class _Room(Generic[Held]):
    """Who is in the memory now, and who will be once those that leave are out."""

    memory: Memory[Held]
    inside: list[Entrant]  # at the beginning, in order
    staying: list[Entrant] = field(init=False)  # will be there later: in order, then those who are new
    leaving: list[Entrant] = field(init=False)
    later: Held = field(init=False)  # of ``staying``
    now: Held = field(init=False)  # of those who are there, and of who is admitted by this decision
    newcomers: list[Candidate] = field(default_factory=list)  # who get the room of those who leave
    displaced: dict[str, Candidate] = field(default_factory=dict)  # by uid: for whom

    def __post_init__(self) -> None:
        self.staying = [one for one in self.inside if one.state in STAYING]
        self.leaving = [one for one in self.inside if one.state is State.LEAVING]
        self.later = self.memory.held(one.uid for one in self.staying)
        self.now = self.memory.held(one.uid for one in self.inside) if self.leaving else self.later

    def admit(self, one: Entrant) -> Place | None:
        """A place at once, or as soon as those that leave are out; None when it does not fit."""
        later = self.memory.plus(self.later, one.uid)
        if not self.memory.fits(later):
            return None
        self.later = later
        self.staying.append(one)
        if not self.leaving:
            self.now = later
            return Place(Outcome.ADMITTED)
        now = self.memory.plus(self.now, one.uid)
        if self.memory.fits(now):
            self.now = now
            return Place(Outcome.ADMITTED)
        self.newcomers.append(one.task)
        return Place(Outcome.WAITING, after=self.leaving[-1].task)

    def make_room(self, one: Entrant, after: Sequence[Entrant], policy: Policy) -> Place | None:
        """A place once others, who come ``after`` it in the order, are out; None when that does not help."""
        victims = self._victims(one, after, policy)
        if not victims:
            return None
        for victim in victims:
            self.displaced[victim.uid] = one.task
        gone = {victim.uid for victim in victims}
        self.leaving += victims
        self.staying = [other for other in self.staying if other.uid not in gone] + [one]
        self.later = self._sum(self.staying)
        self.newcomers.append(one.task)
        return Place(Outcome.WAITING, after=victims[0].task)

    def _victims(self, one: Entrant, after: Sequence[Entrant], policy: Policy) -> list[Entrant]:
        """Fewest that have to leave, the first to leave first."""
        able = self._displaceable(one, after, policy)
        if not able:
            return []
        gone = {other.uid for other in able}
        base = self._sum([*(other for other in self.staying if other.uid not in gone), one])
        if not self.memory.fits(base):
            return []
        # From the first in order to the last: who fits beside all that are spared so far, may stay. That is the same as
        # to send away from the last on and to spare from the first on: fits() is monotone.
        victims = []
        for other in able:
            spared = self.memory.plus(base, other.uid)
            if self.memory.fits(spared):
                base = spared
            else:
                victims.append(other)
        return victims[::-1]

    def _displaceable(self, one: Entrant, after: Iterable[Entrant], policy: Policy) -> list[Entrant]:
        """In order. Who was admitted just now comes before ``one``, and so is not among them."""
        return [
            other
            for other in after
            if other.state in _MAY_LEAVE and other.uid not in self.displaced and policy.displaces(one, other)
        ]

    def first_end(self) -> float:
        """Rounds until the first of those who stay may be done."""
        return min((rounds_left(one) for one in self.staying), default=0.0)

    def begin(self, one: Entrant, policy: Policy) -> float:
        """Rounds before which ``one`` cannot begin, whoever of the others ends when. Those who would leave for it do not
        count: they are gone by then.
        """
        counted = [
            other
            for other in self.staying
            if not (other.state in _MAY_LEAVE and policy.displaces(one, other))
        ]

        def fits_beside(uids: Iterable[str]) -> bool:
            return self.memory.fits(self.memory.plus(self.memory.held(uids), one.uid))

        return earliest_round(counted, fits_beside)

    def of_those_inside(self) -> Mapping[str, Place]:
        """The places of those who were inside at the beginning."""
        places = {}
        for one in self.inside:
            if one.uid in self.displaced and one.state is State.RUNNING:
                places[one.uid] = Place(Outcome.PREEMPTED, displaced_by=self.displaced[one.uid])
            elif one.state is State.LEAVING:
                places[one.uid] = Place(Outcome.PREEMPTED, displaced_by=self._first_newcomer)
            else:
                places[one.uid] = Place(Outcome.ADMITTED)
        return places

    @cached_property
    def _first_newcomer(self) -> Candidate | None:
        return self.newcomers[0] if self.newcomers else None

    def _sum(self, entrants: Iterable[Entrant]) -> Held:
        return self.memory.held(one.uid for one in entrants)
