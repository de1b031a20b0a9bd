"""What the reconcile loop's thread leaves for the page's thread: the newest pass, and losses and events of all tasks.

The loop only puts references down and notes a few numbers; whatever costs time is done by whoever reads. No Secret and no
plan is kept: of a contact, its report alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.api.task import TaskStatus
from mlora_operator.page.curves import Curves, Drawn
from mlora_operator.page.events import KeptEvent, TaskEvents
from mlora_operator.reconcile.ports import Endpoint
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.snapshot import Contact, Key, Pipeline, Snapshot, Task, WorkerGroup
from mlora_worker.protocol import Report, TaskPhase

_WITH_LOSSES = frozenset(
    (TaskPhase.TRAINING, TaskPhase.PREEMPTED, TaskPhase.SAVING, TaskPhase.SUCCEEDED, TaskPhase.FAILED)
)


class Reachable(Protocol):
    """``mlora_operator.coordinator.Links``, as far as it is asked here."""

    def endpoints(self) -> Mapping[Key, Endpoint]: ...


@dataclass(frozen=True)
class LastDecision:
    """One pass of the loop: what it saw, and the statuses that it decided on."""

    number: int
    tasks: tuple[Task, ...]
    pipelines: tuple[Pipeline, ...]
    task_statuses: Mapping[Key, TaskStatus]
    pipeline_statuses: Mapping[Key, PipelineStatus]
    groups: Mapping[Key, WorkerGroup]
    revisions: Mapping[Key, str]
    contacts: Mapping[Key, Contact]
    endpoints: Mapping[Key, Endpoint] = field(default_factory=dict, repr=False)


class Board:
    """``watch`` is called in the loop's thread, everything else in the page's."""

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._lock = threading.Lock()  # held for as long as a few thousand numbers take to copy
        self._curves = Curves()
        self._events = TaskEvents()
        self._number = 0
        self._heard: dict[Key, Report] = {}  # last noted, so that a report is read once
        self._sight: LastDecision | None = None

    def watcher(self, links: Reachable) -> Callable[[Snapshot, Decision], None]:
        """For ``reconcile.loop.Loop``."""
        return lambda snapshot, decision: self.watch(snapshot, decision, links.endpoints())

    def watch(
        self, snapshot: Snapshot, decision: Decision, endpoints: Mapping[Key, Endpoint] | None = None
    ) -> None:
        """A pass has decided."""
        with self._lock:
            self._note_losses(snapshot)
            for event in decision.events:
                self._events.note(event, self._now())
        self._number += 1
        self._sight = LastDecision(
            number=self._number,
            tasks=snapshot.tasks,
            pipelines=snapshot.pipelines,
            task_statuses=decision.task_statuses,
            pipeline_statuses=decision.pipeline_statuses,
            groups=snapshot.groups,
            revisions=snapshot.revisions,
            contacts={key: _without_plan(contact) for key, contact in snapshot.contacts.items()},
            endpoints=endpoints or {},
        )

    def clear(self) -> None:
        """This replica leads no longer: what it saw gets old. Losses and events stay, should it lead again."""
        self._sight = None
        self._heard = {}

    def sight(self) -> LastDecision | None:
        """The newest; None before the first pass of a replica that leads."""
        return self._sight

    def colours(self) -> Mapping[str, int]:
        """By uid, of the tasks whose losses are kept."""
        with self._lock:
            return self._curves.colours()

    def curves(self, uids: Collection[str]) -> Mapping[str, Drawn]:
        with self._lock:
            return {uid: drawn for uid in uids if (drawn := self._curves.drawn(uid)) is not None}

    def events(self, uid: str) -> tuple[KeptEvent, ...]:
        """Of a task, the oldest first."""
        with self._lock:
            return self._events.of(uid)

    def _note_losses(self, snapshot: Snapshot) -> None:
        """A report is a word about the tasks of its own pipeline alone."""
        served: dict[str, str | None] | None = None  # pipeline by uid; looked up where there is something new
        for key, contact in snapshot.contacts.items():
            report = contact.live
            if report is None or self._heard.get(key) is report:
                continue
            self._heard[key] = report
            if served is None:
                served = {task.uid: task.status.pipeline for task in snapshot.tasks}
            here = str(key)
            for task in report.tasks:
                if task.phase in _WITH_LOSSES and served.get(task.uid) == here:
                    seen = task.evaluation
                    evaluation = (seen.step, seen.loss) if seen is not None else None
                    self._curves.note(task.uid, task.step, task.loss, evaluation)
        for key in [key for key in self._heard if key not in snapshot.contacts]:
            del self._heard[key]


def _without_plan(contact: Contact) -> Contact:
    return Contact(report=contact.report, lost_since=contact.lost_since, starting=contact.starting)
