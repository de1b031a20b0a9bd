"""Schedulers to compare: ours with each policy, first in first out, and a whole GPU for each job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from bench.scheduling.pace import EachAlone, Gpus, Together
from bench.scheduling.simulate import Delays, Life, SimMemory, SimPipeline, SimTask
from mlora_operator.scheduling.admission import Admission, AdmissionOutcome
from mlora_operator.scheduling.entrant import Entrant, EntrantState
from mlora_operator.scheduling.fair_share import FairShare
from mlora_operator.scheduling.policy import Policy
from mlora_operator.scheduling.priority import Priority
from mlora_operator.scheduling.schedule import schedule
from mlora_operator.scheduling.shortest_remaining import ShortestRemaining

DELAYS = Delays(load=5, checkpoint=2, save=10)
HOLD_BACK = 600.0
QUANTUM = 600.0  # seconds


@dataclass(slots=True)
class Ours:
    """The operator's scheduler."""

    policy: str
    gpus: Gpus
    weights: Mapping[str, float]
    pipeline: SimPipeline | None = None  # fairShare looks back at what it has served

    def __call__(
        self, entrants: Sequence[Entrant], memory: SimMemory, now: datetime
    ) -> Mapping[str, Admission]:
        return schedule(entrants, memory, self._policy(now), now, timedelta(seconds=HOLD_BACK))

    def _policy(self, now: datetime) -> Policy:
        if self.policy == "shortestRemaining":
            return ShortestRemaining(now, timedelta(seconds=HOLD_BACK))
        if self.policy == "priority":
            return Priority()
        assert self.pipeline is not None
        served: defaultdict[str, float] = defaultdict(float)
        for life in self.pipeline.lives.values():
            served[life.task.namespace] += int(life.done) * life.task.step_tokens
        return FairShare(served, self.weights, QUANTUM * self.gpus.rate * self.gpus.count)


def first_come(entrants: Sequence[Entrant], memory: SimMemory, now: datetime) -> Mapping[str, Admission]:
    """In the order of arrival; whoever does not fit keeps out all behind it; nobody ever leaves."""
    del now
    inside = [one for one in entrants if one.state is not EntrantState.WAITING]
    places = {one.uid: Admission(AdmissionOutcome.ADMITTED) for one in inside}
    held = memory.held(one.uid for one in inside)
    waiting = [one for one in entrants if one.state is EntrantState.WAITING]
    full = False
    for one in sorted(waiting, key=lambda one: one.task.key[1:]):
        if not memory.fits_alone(one.uid):
            places[one.uid] = Admission(AdmissionOutcome.NEVER_FITS)
            continue
        full = full or not memory.fits(memory.plus(held, one.uid))
        if not full:
            held = memory.plus(held, one.uid)
        places[one.uid] = Admission(AdmissionOutcome.WAITING if full else AdmissionOutcome.ADMITTED)
    return places


def on_a_pipeline(
    tasks: Sequence[SimTask], budget: int, gpus: Gpus, pace: Together, how: str, weights: Mapping[str, float]
) -> Mapping[str, Life]:
    """Lives under ``how``: a policy of ours, or ``fifo``."""
    ours = Ours(how, gpus, weights)
    scheduler = first_come if how == "fifo" else ours
    pipeline = SimPipeline(tasks, budget, scheduler, pace, DELAYS, hold_back=HOLD_BACK)
    ours.pipeline = pipeline
    return pipeline.run()


def a_gpu_for_each(tasks: Sequence[SimTask], gpus: Gpus) -> Mapping[str, Life]:
    """One job on a GPU, the base model with it; first come, first served. Every job is taken to fit."""
    budget = sum(task.own + task.shared for task in tasks)
    return SimPipeline(tasks, budget, first_come, EachAlone(gpus), DELAYS, places=gpus.count).run()
