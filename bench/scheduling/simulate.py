"""Simulated pipelines under a scheduler: discrete events, no threads, no clock but its own. Pure and deterministic.

A task arrives, is let in, loads (starting), trains one step in each round (running), saves and ends. One that is told to
leave ends its step, writes a checkpoint (leaving) and waits again with the steps that it has done. The scheduler is asked
after every change, as the operator's loop does, and once more when a task has waited for ``hold_back``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol

from mlora_operator.scheduling.admission import Admission, AdmissionOutcome, MemoryCheck
from mlora_operator.scheduling.entrant import Entrant, EntrantProgress, EntrantState
from mlora_operator.scheduling.order import Candidate

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
_TICK = 1e-5  # seconds: a datetime counts microseconds


@dataclass(frozen=True, slots=True)
class SimTask:
    uid: str
    arrival: float  # seconds
    steps: int
    step_tokens: int
    own: int  # bytes that it adds
    shared: int = 0  # bytes of which only the largest counts, such as those of the widest microbatch
    priority: int = 0
    namespace: str = "a"


@dataclass(frozen=True, slots=True)
class SimMemory:
    """``own`` of all tasks and the largest ``shared`` must not exceed ``budget``, nor their number ``places``."""

    tasks: Mapping[str, SimTask]
    budget: int
    places: int | None = None

    def held(self, uids: Iterable[str]) -> tuple[int, int, int]:
        tasks = [self.tasks[uid] for uid in uids]
        return sum(one.own for one in tasks), max((one.shared for one in tasks), default=0), len(tasks)

    def plus(self, held: tuple[int, int, int], uid: str) -> tuple[int, int, int]:
        task = self.tasks[uid]
        return held[0] + task.own, max(held[1], task.shared), held[2] + 1

    def fits_alone(self, uid: str) -> bool:
        return self.tasks[uid].own + self.tasks[uid].shared <= self.budget

    def fits(self, held: tuple[int, int, int]) -> bool:
        return held[0] + held[1] <= self.budget and (self.places is None or held[2] <= self.places)

    def fits_beside(self, held: tuple[int, int, int], uid: str) -> bool:
        return self.fits(self.plus(held, uid))

    def fits_already(self, held: tuple[int, int, int]) -> bool:
        del held
        return True

    def check(self, held: tuple[int, int, int]) -> MemoryCheck:
        return MemoryCheck(self.fits(held), 0, held[0] + held[1], self.budget)


class Scheduler(Protocol):
    def __call__(
        self, entrants: Sequence[Entrant], memory: SimMemory, now: datetime
    ) -> Mapping[str, Admission]: ...


Pace = Callable[[Sequence[SimTask]], Mapping[str, float]]  # tasks in training -> seconds of a step of each


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds."""

    load: float = 0.0
    checkpoint: float = 0.0
    save: float = 0.0


@dataclass(slots=True)
class Life:
    """What became of a task. Times are seconds since the beginning."""

    task: SimTask
    state: EntrantState | None = None  # None: not there yet, or ended
    since: float = 0.0  # of the present state
    placed: float = 0.0  # when it last got a place
    done: float = 0.0  # steps, with the part of the present one
    begun: float | None = None
    ended: float | None = None
    preemptions: int = 0
    place: AdmissionOutcome | None = None

    @property
    def waited(self) -> float:
        """Until it was first let in."""
        assert self.begun is not None
        return self.begun - self.task.arrival

    @property
    def took(self) -> float:
        assert self.ended is not None
        return self.ended - self.task.arrival

    @property
    def trains(self) -> bool:
        """Steps are done: a leaving task ends the one that it is in."""
        return self.state is EntrantState.RUNNING or (
            self.state is EntrantState.LEAVING and not self.done.is_integer()
        )


@dataclass
class SimPipeline:
    """One pipeline. ``watch`` is called after each decision with the time, all lives and the places."""

    tasks: Sequence[SimTask]
    budget: int
    scheduler: Scheduler
    pace: Pace
    delays: Delays = Delays()
    places: int | None = None
    hold_back: float = math.inf
    watch: Callable[[float, Mapping[str, Life], Mapping[str, Admission]], None] | None = None
    lives: dict[str, Life] = field(init=False)
    tokens: float = field(init=False, default=0.0)  # trained

    def run(self) -> Mapping[str, Life]:
        """Until every task has ended, or is told that it never fits."""
        self.memory = SimMemory({task.uid: task for task in self.tasks}, self.budget, self.places)
        self.lives = {task.uid: Life(task) for task in self.tasks}
        coming = sorted(self.tasks, key=lambda task: (task.arrival, task.uid), reverse=True)
        present: dict[str, Life] = {}
        now = 0.0
        while coming or any(life.place is not AdmissionOutcome.NEVER_FITS for life in present.values()):
            while coming and coming[-1].arrival <= now:
                task = coming.pop()
                life = present[task.uid] = self.lives[task.uid]
                life.state, life.since = EntrantState.WAITING, task.arrival
            for uid in [uid for uid, life in present.items() if life.state is None]:
                del present[uid]
            self._decide(present, now)
            rates = self.pace([life.task for life in present.values() if life.trains])
            until = min([self._next(life, rates, now) for life in present.values()], default=math.inf)
            if coming:
                until = min(until, coming[-1].arrival)
            if math.isinf(until):
                assert all(life.place is AdmissionOutcome.NEVER_FITS for life in present.values()), (
                    "nothing moves"
                )
                break
            self._advance(present, rates, now, max(now, until))
            now = max(now, until)
        return self.lives

    def _decide(self, present: Mapping[str, Life], now: float) -> None:
        entrants = [_entrant(life) for life in present.values()]
        places = self.scheduler(entrants, self.memory, _at(now))
        for uid, place in places.items():
            life = present[uid]
            life.place = place.outcome
            if life.state is EntrantState.WAITING and place.outcome is AdmissionOutcome.ADMITTED:
                life.state, life.since = EntrantState.STARTING, now
                life.placed = now
                life.begun = now if life.begun is None else life.begun
            elif life.state is EntrantState.RUNNING and place.outcome is AdmissionOutcome.PREEMPTED:
                life.state, life.since = EntrantState.LEAVING, math.inf if not life.done.is_integer() else now
                life.preemptions += 1
        if self.watch is not None:
            self.watch(now, present, places)

    def _next(self, life: Life, rates: Mapping[str, float], now: float) -> float:
        """When the task changes its state by itself."""
        task = life.task
        match life.state:
            case EntrantState.WAITING:
                limit = life.since + self.hold_back + _TICK
                return limit if limit > now else math.inf
            case EntrantState.STARTING:
                return life.since + self.delays.load
            case EntrantState.RUNNING:
                return now + (task.steps - life.done) * rates[task.uid]
            case EntrantState.LEAVING if life.trains:
                return now + (math.ceil(life.done) - life.done) * rates[task.uid]
            case EntrantState.LEAVING:
                return life.since + self.delays.checkpoint
            case EntrantState.SAVING:
                return life.since + self.delays.save
        return math.inf

    def _advance(
        self, present: Mapping[str, Life], rates: Mapping[str, float], now: float, then: float
    ) -> None:
        due = {uid for uid, life in present.items() if self._next(life, rates, now) <= then}
        for uid, life in present.items():
            if life.trains:
                self._train(life, (then - now) / rates[uid], uid in due, then)
            elif uid in due:
                self._turn(life, then)

    def _train(self, life: Life, steps: float, is_due: bool, then: float) -> None:
        goal = float(life.task.steps) if life.state is EntrantState.RUNNING else float(math.ceil(life.done))
        before, life.done = life.done, goal if is_due else min(goal, life.done + steps)
        self.tokens += (life.done - before) * life.task.step_tokens
        if is_due:
            life.state = EntrantState.SAVING if life.state is EntrantState.RUNNING else EntrantState.LEAVING
            life.since = then

    def _turn(self, life: Life, then: float) -> None:
        match life.state:
            case EntrantState.STARTING:
                life.state, life.since = EntrantState.RUNNING, then
            case EntrantState.LEAVING:
                all_done = life.done == life.task.steps
                life.state, life.since = EntrantState.SAVING if all_done else EntrantState.WAITING, then
            case EntrantState.SAVING:
                life.state, life.ended = None, then


def _entrant(life: Life) -> Entrant:
    task, state = life.task, life.state
    assert state is not None
    return Entrant(
        Candidate(task.uid, task.namespace, task.uid, task.priority, _at(task.arrival)),
        state,
        _at(life.since if state is EntrantState.WAITING else life.placed),
        EntrantProgress(math.floor(life.done), task.steps, float(task.step_tokens)),
    )


def _at(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=seconds)
