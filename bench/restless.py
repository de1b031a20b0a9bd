"""Tasks that come and go all the time under a hard memory budget, at a slow store: the second story of ``bench oom``.

The product's own scheduler and memory model say who trains. Every moment a task in training is suspended and resumed a
little later, or one that waits is given a higher priority and displaces others, or one is taken out of the plan and comes
back, as one does that is tried again. So states are on their way to the store and back at any time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from bench.ranks import Ranks
from mlora_operator.memory.learned import learn
from mlora_operator.memory.model import MemoryModel, demand_of
from mlora_operator.memory.scheduler_memory import scheduler_memory
from mlora_operator.scheduling.admission import AdmissionOutcome
from mlora_operator.scheduling.entrant import Entrant, EntrantProgress, EntrantState
from mlora_operator.scheduling.order import Candidate
from mlora_operator.scheduling.priority import Priority
from mlora_operator.scheduling.schedule import schedule
from mlora_worker.protocol import FailureReason, Report, TaskPhase, TaskPlan, TaskReport

EVERY = 6  # microbatches between two disturbances
AWAY = (0.5, 3.0)  # seconds that a task is suspended, or out of the plan
_NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
_ENDED = (TaskPhase.SUCCEEDED, TaskPhase.FAILED)


@dataclass(slots=True)
class Time:
    """Between two changes of who is admitted. Parts of the budget."""

    predicted: float
    full: bool  # somebody whose rows are ready waits for memory
    used: list[float] = field(
        default_factory=list
    )  # at the peak of each microbatch, with what tasks hold that are out


class Restless:
    """Lets tasks in as the operator does, and disturbs them, until all have ended."""

    def __init__(self, tasks: Sequence[TaskPlan], budget: int, microbatch_tokens: int, enough: int) -> None:
        self._tasks = {task.uid: task for task in tasks}
        self._budget, self._width, self._enough = budget, microbatch_tokens, enough
        self._chance = random.Random(1)
        self._began = time.monotonic()
        self._disturbed = 0  # number of microbatches at the last one
        self._suspended: dict[str, float] = {}  # until when
        self._gone: dict[str, float] = {}  # out of the plan, until when
        self._started: set[str] = set()
        self._told: Mapping[str, bool] | None = None  # who is in the plan, and is admitted
        self._seen = 0  # number of the newest microbatch whose sample was noted
        self.ooms = self.succeeded = self.too_large = self.most = 0
        self.failures: list[str] = []
        self.suspensions = self.displacements = self.retries = 0
        self.most_held = 0.0  # part of the budget
        self.times: list[Time] = []

    def through(self, ranks: Ranks) -> None:
        self._plan(ranks, dict.fromkeys(self._tasks, False))
        while self._tasks:
            # A long poll gives way to what is to be done by the clock.
            for report in self._reports(ranks):
                self._note(report)
                if not self._tasks:
                    return
                self._disturb(report)
                self._decide(report, ranks)

    def _reports(self, ranks: Ranks) -> Iterator[Report]:
        for _, report in ranks.reports(3600.0, tasks_may_fail=True, wait=0.5, repeat=True):
            yield report

    def _note(self, report: Report) -> None:
        held = sum(report.held or ())
        self.most_held = max(self.most_held, held / self._budget)
        fresh = [one for one in report.memory if one.item > self._seen and not one.calibration]
        self._seen = max((one.item for one in fresh), default=self._seen)
        if self.times and self.times[-1].full:
            self.times[-1].used += [(one.used_bytes + held) / self._budget for one in fresh if one.used_bytes]
        for task in report.tasks:
            if task.step:
                self._started.add(task.uid)
            if task.uid in self._tasks and task.phase in _ENDED and task.uid not in self._gone:
                self._end(task)

    def _end(self, task: TaskReport) -> None:
        del self._tasks[task.uid]
        self._suspended.pop(task.uid, None)
        self.succeeded += task.phase is TaskPhase.SUCCEEDED
        if task.failure is not None:
            self.ooms += task.failure.reason is FailureReason.OUT_OF_MEMORY
            self.failures.append(f"{task.failure.reason}: {task.failure.message}")

    def _disturb(self, report: Report) -> None:
        now = time.monotonic()
        for away in (self._suspended, self._gone):
            for uid in [uid for uid, until in away.items() if until <= now]:
                del away[uid]
        if report.wire.microbatches - self._disturbed < EVERY:
            return
        self._disturbed = report.wire.microbatches
        until = now + self._chance.uniform(*AWAY)
        phases = {task.uid: task.phase for task in report.tasks if task.uid in self._tasks}
        trains = sorted(uid for uid, phase in phases.items() if phase is TaskPhase.TRAINING)
        trains = [uid for uid in trains if uid not in self._suspended and uid not in self._gone]
        waits = sorted(
            uid for uid, phase in phases.items() if phase in (TaskPhase.PREPARED, TaskPhase.PREEMPTED)
        )
        match self._chance.choice(("suspend", "suspend several", "displace", "retry")):
            case "suspend" if trains:
                self._suspended[self._chance.choice(trains)] = until
                self.suspensions += 1
            case "suspend several" if trains:
                for uid in self._chance.sample(trains, min(2, len(trains))):
                    self._suspended[uid] = until
                    self.suspensions += 1
            case "displace" if waits:
                uid = self._chance.choice(waits)
                highest = max(task.priority for task in self._tasks.values())
                self._tasks[uid] = self._tasks[uid].model_copy(update={"priority": highest + 1})
                self.displacements += 1
            case "retry" if trains:
                self._gone[self._chance.choice(trains)] = until
                self.retries += 1

    def _decide(self, report: Report, ranks: Ranks) -> None:
        assert report.facts is not None
        facts = report.facts
        demands = {
            task.uid: demand_of(task.lora, task.training, facts.max_positions)
            for task in self._tasks.values()
        }
        blank = MemoryModel(facts, report.stages, self._width, self._budget, 0.0, demands)
        model = replace(blank, learned=learn(blank, (), report.memory, report.exhausted))
        entrants = [one for task in report.tasks if (one := self._entrant(task)) is not None]
        now = _NOON + timedelta(seconds=time.monotonic() - self._began)
        places = schedule(entrants, scheduler_memory(model, report.held or ()), Priority(), now)
        never = [uid for uid, place in places.items() if place.outcome is AdmissionOutcome.NEVER_FITS]
        self.too_large += len(never)
        for uid in never:
            del self._tasks[uid]
        admitted = {
            uid: uid in places
            and places[uid].outcome is AdmissionOutcome.ADMITTED
            and uid not in self._suspended
            for uid in self._tasks
            if uid not in self._gone
        }
        if admitted == self._told:
            return
        inside = [uid for uid, yes in admitted.items() if yes]
        self.most = max(self.most, len(inside))
        waiting = [
            one for one in entrants if one.state is EntrantState.WAITING and not admitted.get(one.uid, False)
        ]
        full = bool(waiting) and len(self._tasks) - len(inside) > self._enough
        self.times.append(Time(model.check(inside).needed / self._budget, full))
        self._plan(ranks, admitted)

    def _entrant(self, reported: TaskReport) -> Entrant | None:
        """As the operator sees a task (``reconcile/admission/workload.py``)."""
        task = self._tasks.get(reported.uid)
        if task is None:
            return None
        may = bool(self._told and self._told.get(task.uid, False))
        match reported.phase:
            case TaskPhase.TRAINING if not reported.crowded_out and not reported.waits_for_store:
                state = (
                    EntrantState.RUNNING if may and task.uid not in self._suspended else EntrantState.LEAVING
                )
            case TaskPhase.SAVING:
                if reported.waits_for_store:
                    return None
                state = EntrantState.SAVING
            case TaskPhase.TRAINING | TaskPhase.PREPARED | TaskPhase.PREEMPTED:
                if task.uid in self._suspended or task.uid in self._gone:
                    return None
                state = EntrantState.STARTING if may and not reported.crowded_out else EntrantState.WAITING
            case _:
                return None
        number = int(task.uid.rpartition("-")[2])
        made = _NOON - timedelta(days=1) + timedelta(seconds=number)
        candidate = Candidate(task.uid, task.namespace, task.name, task.priority, made)
        return Entrant(candidate, state, _NOON, EntrantProgress(reported.step, reported.total_steps or None))

    def _plan(self, ranks: Ranks, admitted: Mapping[str, bool]) -> None:
        self._told = admitted
        ranks.plan(
            [
                self._tasks[uid].model_copy(update={"admitted": yes, "started": uid in self._started})
                for uid, yes in admitted.items()
            ]
        )
