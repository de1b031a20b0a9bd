"""What the scheduler has to know of a pipeline's tasks: who can be scheduled, and what each asks of the memory. Pure.

From one decision to the next most is the very same: a task's object until somebody writes it, its report until it moves. So
what was read is remembered for each pipeline (``memoize``), and only what has moved is read again. An answer never depends
on that: the objects are frozen, and the same ones say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from mlora_operator.memory.model import Demand
from mlora_operator.reconcile.admission.model_requests import ModelRequest, ModelRequests, of_model
from mlora_operator.reconcile.admission.pipeline_view import PipelineView
from mlora_operator.reconcile.admission.workload import entrant, sent_admissions
from mlora_operator.reconcile.memoize import Memoized
from mlora_operator.reconcile.state.snapshot import Task
from mlora_operator.scheduling.entrant import Entrant, EntrantProgress, EntrantState
from mlora_worker.protocol import Failure, TaskPhase, TaskReport


@dataclass(frozen=True)
class Queue:
    """``entrants``: who can be scheduled, in no order that matters; most queues are never asked for them, so ``steps``
    are counted in when they are. ``demands``: of all tasks, by uid.
    ``refused``: whom the model cannot train, and why. ``unready``: whose rows are not prepared, or who has to wait for
    new workers. ``suspended``: of those who hold memory.
    """

    as_read: tuple[Entrant, ...]
    demands: Mapping[str, Demand]
    refused: Mapping[str, Failure]
    unready: tuple[str, ...]
    suspended: tuple[str, ...]
    positions: Mapping[str, tuple[int, Task]]  # of entrants, by uid
    read: Mapping[str, _Read] = field(default_factory=dict, compare=False)  # by uid
    # The same object in two queues of a pipeline: the later one differs from the former at most in steps that tasks which
    # are inside have done since.
    era: object = field(default_factory=object, compare=False)
    steps: Mapping[int, int] = field(default_factory=dict)  # that some have done by now, by position

    @cached_property
    def entrants(self) -> tuple[Entrant, ...]:
        if not self.steps:
            return self.as_read
        entrants = list(self.as_read)
        for position, step in self.steps.items():
            task, state, since, (_, total, tokens) = entrants[position]
            entrants[position] = Entrant(task, state, since, EntrantProgress(step, total, tokens))
        return tuple(entrants)


class _Read(NamedTuple):
    """What was read of a task, and what it was read from; also that are the model's asks, and whether workers are stale."""

    task: Task
    reported: TaskReport | None
    may: bool | None
    asks: ModelRequest | None
    entrant: Entrant | None


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a queue was made of."""

    tasks: tuple[Task, ...]
    reports: tuple[TaskReport, ...]
    sent: Mapping[str, bool]
    asks: ModelRequests
    stale: bool
    unjudged: frozenset[str]

    def holds_for(self, other: _Seen) -> bool:
        """All the same but for reports. Tuples compare by identity first, so this touches no task that is the same."""
        return (
            self.asks is other.asks
            and self.stale is other.stale
            and self.unjudged == other.unjudged
            and len(self.reports) == len(other.reports)
            and self.tasks == other.tasks
            and self.sent == other.sent
        )


Queues = Memoized[tuple[_Seen, Queue]]  # by the pipeline's uid
_NOTHING: Mapping[str, _Read] = {}


def queue_of(view: PipelineView, known: Queues) -> Queue:
    """See ``fresh_queue``: the same, from what is known as far as it holds."""
    if view.report is None or view.shape is None:
        return fresh_queue(view)
    seen = _Seen(
        view.tasks,
        view.report.tasks,
        sent_admissions(view),
        of_model(view.shape[0]),
        view.stale,
        view.unjudged,
    )
    before = known.last(view.pipeline.uid)
    made = None
    if before is not None and before[0].holds_for(seen):
        made = _moved_on(view, *before, seen)
    if made is None:
        usable = before is not None and before[0].asks is seen.asks and before[0].stale is seen.stale
        made = fresh_queue(view, before[1].read if before is not None and usable else _NOTHING)
    known.keep(view.pipeline.uid, (), (seen, made))
    return made


def fresh_queue(view: PipelineView, read: Mapping[str, _Read] = _NOTHING) -> Queue:
    """``read``: what may be taken over of a former one, for the same model and with workers as stale.

    1. Who holds memory is scheduled, whatever else is true of it; so is one that leaves because it is suspended.
    2. Of the others, one that is suspended is not spoken of, and one that the model cannot train is refused.
    3. One whose rows are not prepared cannot be scheduled yet, and nobody new before the workers
       are those of the present configuration: else they would be in use for ever.
    4. One that has only its adapter to upload is not spoken of: nothing is judged of it any more.
    """
    known = of_model(view.shape[0]) if view.shape is not None else None
    stale, plan = view.stale, sent_admissions(view)
    reports = view.contact.tasks if view.report is not None else {}
    entrants: list[Entrant] = []
    demands: dict[str, Demand] = {}
    refused: dict[str, Failure] = {}
    unready: list[str] = []
    suspended: list[str] = []
    positions: dict[str, tuple[int, Task]] = {}
    now_read: dict[str, _Read] = {}
    for task in view.tasks:
        uid = task.uid
        if uid in view.unjudged:
            continue
        reported, may, found = reports.get(uid), plan.get(uid), read.get(uid)
        if found is None or found.task is not task or found.reported is not reported or found.may is not may:
            if task.spec is None:
                continue
            asks = known.of(task.spec) if known is not None else None
            found = _Read(task, reported, may, asks, entrant(view, task, reported, may))
        now_read[uid] = found
        _, _, _, asks, one = found
        spec = task.spec
        assert spec is not None
        if asks is not None:
            demands[uid] = asks.demand
        if one is not None and one.state is not EntrantState.WAITING:
            positions[uid] = len(entrants), task
            entrants.append(one)
            if spec.suspend:
                suspended.append(uid)
        elif spec.suspend or _is_saving(reported):
            continue
        elif asks is not None and asks.misfit is not None:
            refused[uid] = asks.misfit
        elif one is None or stale:
            unready.append(uid)
        else:
            positions[uid] = len(entrants), task
            entrants.append(one)
    return Queue(tuple(entrants), demands, refused, tuple(unready), tuple(suspended), positions, now_read)


def _is_saving(reported: TaskReport | None) -> bool:
    return reported is not None and reported.phase is TaskPhase.SAVING


def _moved_on(view: PipelineView, before: _Seen, made: Queue, now: _Seen) -> Queue | None:
    """The queue with reports that have changed; None when it is simpler to read everything anew."""
    steps: dict[int, int] = {}
    turned: dict[int, Entrant] = {}
    era = made.era
    for new, old in zip(now.reports, before.reports, strict=True):
        if new is old:
            continue
        where = made.positions.get(new.uid)
        if where is None or new.uid != old.uid:
            return None  # it may count now
        position, task = where
        state = made.as_read[position].state
        if _only_stepped(old, new):
            steps[position] = new.step
            if new.step < old.step or (new.step > old.step and state is EntrantState.WAITING):
                era = object()
            continue
        newer = entrant(view, task, new, now.sent.get(new.uid))
        if newer is None or (newer.state is not state and newer.state is EntrantState.WAITING):
            return None  # it may not be scheduled now: who is inside is, whatever else is true of it
        turned[position] = newer
    if turned:
        listed = replace(made, steps={**made.steps, **steps}).entrants
        as_read = tuple(turned.get(position, one) for position, one in enumerate(listed))
        return replace(made, as_read=as_read, steps={}, era=object())
    return replace(made, steps={**made.steps, **steps}, era=era) if steps else made


def _only_stepped(before: TaskReport, after: TaskReport) -> bool:
    """As far as an entrant is made of a report, nothing but its step is another one."""
    return (
        after.phase is before.phase
        and after.crowded_out is before.crowded_out
        and after.released is before.released
        and (after.blocked is None) is (before.blocked is None)
        and after.total_steps == before.total_steps
        and (after.data is before.data or after.data == before.data)
    )
