"""Which tasks are admitted to a pipeline's memory, which have to leave it, and which wait for what. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Generic

from mlora_operator.scheduling.admission import Admission, AdmissionOutcome
from mlora_operator.scheduling.entrant import STAYING, Entrant, EntrantState
from mlora_operator.scheduling.memory import CheckBeside, Held, PipelineMemory
from mlora_operator.scheduling.order import Candidate
from mlora_operator.scheduling.policy import Policy
from mlora_operator.scheduling.reservation import first_end, is_over_by

HOLD_BACK = timedelta(minutes=10)
_WAITING = EntrantState.WAITING
_ADMITTED = Admission(AdmissionOutcome.ADMITTED)
_LINGERS = Admission(AdmissionOutcome.WAITING, lingers=True)
_MAY_LEAVE = (
    EntrantState.STARTING,
    EntrantState.RUNNING,
)  # one that starts is only told so once it has begun


def schedule(
    entrants: Iterable[Entrant],
    memory: PipelineMemory[Held],
    policy: Policy,
    now: datetime,
    hold_back: timedelta = HOLD_BACK,
) -> Mapping[str, Admission]:
    """What becomes of each task, by uid. Deterministic: the same whichever way the tasks are listed.

    1. A task that starts, trains or saves stays admitted unless rule 5 preempts it. One that leaves still leaves. When
       they do not fit together any more, since more is known of the memory, those that start wait again: the last first,
       until the others fit; one that would not even fit alone is told so. Their room is nobody's yet: the worker may have
       let them in just now.
    2. A waiting task that does not fit even alone never will: it is told so and stands in nobody's way.
    3. The other waiting tasks are taken in the policy's order. One that fits beside all that are admitted is
       admitted as soon as it also fits beside those that are still leaving, and beside what those that are out still hold.
    4. One that fits but for those that are leaving gets their room: nobody after it does.
    5. For one that does not fit, running tasks after it in the order have to leave as far as the policy allows: the last
       first, until it fits; then those are spared again, the first first, beside whom it still fits, also of those who
       would have had to leave for one before it. When it does not fit even so, nobody has to leave.
    6. One that still does not fit waits, and those after it may pass. Once it has waited for ``hold_back``, none may any
       more, but one that fits without anybody leaving and is done before anybody else may be (``reservation``).
    """
    listed = tuple(entrants)
    admissions: dict[str, Admission] = {}
    for one in listed:
        if one.state is _WAITING and not memory.fits_alone(one.task.uid):
            admissions[one.task.uid] = _never(memory, one.task.uid)
    if admissions:
        listed = tuple(one for one in listed if one.task.uid not in admissions)
    ordered, called_back = _as_far_as_they_fit(policy.order(listed), memory)
    occupancy = _Occupancy(memory, [one for one in ordered if one.state is not _WAITING])
    behind: Admission | None = None  # of those that stand behind one that has waited for long
    for one in ordered:
        if one.state is not _WAITING:
            occupancy.passed(one)
            continue
        uid = one.task.uid
        if behind is not None:
            may_pass = is_over_by(one, occupancy.rounds_to_first_end())
            admissions[uid] = (occupancy.admit(one) if may_pass else None) or behind
        else:
            admission = occupancy.admit(one) or occupancy.make_room(one, policy)
            admissions[uid] = admission or Admission(
                AdmissionOutcome.WAITING, CheckBeside(memory, occupancy.later, uid)
            )
            if admission is None and now - one.since >= hold_back:
                behind = Admission(AdmissionOutcome.WAITING, behind=one.task)
    waiting = {
        uid: Admission(AdmissionOutcome.WAITING, CheckBeside(memory, occupancy.later, uid))
        if memory.fits_alone(uid)
        else _never(memory, uid)
        for uid in called_back
    }
    return {**admissions, **occupancy.of_newcomers(admissions), **occupancy.of_those_inside(), **waiting}


def _never(memory: PipelineMemory[Held], uid: str) -> Admission:
    return Admission(AdmissionOutcome.NEVER_FITS, CheckBeside(memory, memory.held(()), uid))


def _as_far_as_they_fit(
    ordered: Sequence[Entrant], memory: PipelineMemory[Held]
) -> tuple[Sequence[Entrant], frozenset[str]]:
    """Of those that start, the last ones as leaving, until all others that are admitted fit; with their uids."""
    inside = [one for one in ordered if one.state is not _WAITING]
    back: set[str] = set()
    for one in reversed([one for one in inside if one.state is EntrantState.STARTING]):
        if memory.fits(memory.held(other.uid for other in inside if other.uid not in back)):
            break
        back.add(one.uid)
    if back:
        ordered = [one._replace(state=EntrantState.LEAVING) if one.uid in back else one for one in ordered]
    return ordered, frozenset(back)


@dataclass
class _Occupancy(Generic[Held]):
    """Who is in the memory now, and who will be once those that leave are out."""

    memory: PipelineMemory[Held]
    inside: list[Entrant]  # at the beginning, in order
    staying: list[Entrant] = field(init=False)  # will be there later: in order, then those who are new
    leaving: list[Entrant] = field(init=False)
    ahead: list[Entrant] = field(init=False)  # who may leave and is not passed yet: the next in order last
    later: Held = field(init=False)  # of ``staying``
    now: Held = field(init=False)  # of those who are there, and of who is admitted by this decision
    first_end: float | None = None  # of ``staying``; None: to be worked out
    behind: int = 0  # how many of ``inside`` the order has passed
    newcomers: list[Candidate] = field(default_factory=list)  # who get the room of those who leave
    displaced: dict[str, Candidate] = field(default_factory=dict)  # by uid: for whom

    def __post_init__(self) -> None:
        self.staying = [one for one in self.inside if one.state in STAYING]
        self.leaving = [one for one in self.inside if one.state is EntrantState.LEAVING]
        self.ahead = [one for one in reversed(self.staying) if one.state in _MAY_LEAVE]
        self.later = self._sum(self.staying)
        self.now = self.memory.held(one.uid for one in self.inside) if self.leaving else self.later

    def passed(self, one: Entrant) -> None:
        """The order has come to one who is inside: those after it cannot displace it."""
        self.behind += 1
        if self.ahead and self.ahead[-1] is one:
            self.ahead.pop()

    def rounds_to_first_end(self) -> float:
        if self.first_end is None:
            self.first_end = first_end(self.staying)
        return self.first_end

    def admit(self, one: Entrant) -> Admission | None:
        """Admitted at once, or as soon as those that leave are out; None when it does not fit."""
        if not self.memory.fits_beside(self.later, one.task.uid):
            return None
        self.later = self.memory.plus(self.later, one.task.uid)
        self.staying.append(one)
        self.first_end = None
        if self.leaving and not self.memory.fits_beside(self.now, one.uid):
            self.newcomers.append(one.task)
            return Admission(AdmissionOutcome.WAITING, after=self.leaving[-1].task)
        now = self.memory.plus(self.now, one.uid) if self.leaving else self.later
        if not self.memory.fits_already(now):
            return _LINGERS
        self.now = now
        return _ADMITTED

    def make_room(self, one: Entrant, policy: Policy) -> Admission | None:
        """Admitted once others, who come after it in the order, are out; None when that does not help."""
        if not self.ahead:
            return None
        victims = self._victims(one, policy)
        if not victims:
            return None
        for victim in victims:
            self.displaced[victim.uid] = one.task
        gone = {victim.uid for victim in victims}
        self.leaving += victims
        self.staying = [other for other in self.staying if other.uid not in gone] + [one]
        self.later = self._sum(self.staying)
        self._spare([other for other in self.inside if other.uid in self.displaced.keys() - gone])
        self.ahead = [
            other
            for other in reversed(self.inside[self.behind :])
            if other.state in _MAY_LEAVE and other.uid not in self.displaced
        ]
        self.first_end = None
        self.newcomers.append(one.task)
        return Admission(AdmissionOutcome.WAITING, after=victims[0].task)

    def _spare(self, displaced: Iterable[Entrant]) -> None:
        """Those who would have had to leave for one before, and fit beside all that are admitted now."""
        for other in displaced:
            if self.memory.fits_beside(self.later, other.uid):
                self.later = self.memory.plus(self.later, other.uid)
                self.staying.append(other)
                self.leaving.remove(other)
                del self.displaced[other.uid]

    def _victims(self, one: Entrant, policy: Policy) -> list[Entrant]:
        """Fewest that have to leave, the first to leave first."""
        able = [other for other in reversed(self.ahead) if policy.displaces(one, other)]  # in order
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
            if self.memory.fits_beside(base, other.uid):
                base = self.memory.plus(base, other.uid)
            else:
                victims.append(other)
        return victims[::-1]

    def of_newcomers(self, given: Mapping[str, Admission]) -> Mapping[str, Admission]:
        """What becomes of them once it is known who leaves: who was to leave for one may have been spared since."""
        leaving = {one.task for one in self.leaving}
        return {
            one.uid: Admission(AdmissionOutcome.WAITING, after=self.leaving[-1].task)
            for one in self.newcomers
            if given[one.uid].after not in leaving
        }

    def of_those_inside(self) -> Mapping[str, Admission]:
        """What becomes of those who were inside at the beginning."""
        admissions = {}
        for one in self.inside:
            if one.uid in self.displaced and one.state is EntrantState.RUNNING:
                admissions[one.uid] = Admission(
                    AdmissionOutcome.PREEMPTED, displaced_by=self.displaced[one.uid]
                )
            elif one.state is EntrantState.LEAVING:
                admissions[one.uid] = Admission(AdmissionOutcome.PREEMPTED, displaced_by=self._first_newcomer)
            else:
                admissions[one.uid] = _ADMITTED
        return admissions

    @cached_property
    def _first_newcomer(self) -> Candidate | None:
        return self.newcomers[0] if self.newcomers else None

    def _sum(self, entrants: Iterable[Entrant]) -> Held:
        return self.memory.held(one.uid for one in entrants)
