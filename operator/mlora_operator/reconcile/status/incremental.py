"""The statuses of tasks, as far as they are known from the decision before, and what is new in them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial

from mlora_operator.api.meta import timestamp
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.memoize import Memoized
from mlora_operator.reconcile.state.acceptance import Acceptance
from mlora_operator.reconcile.state.decision import DecisionFault, Event
from mlora_operator.reconcile.state.isolation import Isolation
from mlora_operator.reconcile.state.snapshot import Key, Task
from mlora_operator.reconcile.status.admission_message import admission_message
from mlora_operator.reconcile.status.conditions import news
from mlora_operator.reconcile.status.lifetime import overdue
from mlora_operator.reconcile.status.pipeline_summary import PipelineContext
from mlora_operator.reconcile.status.row_events import row_events
from mlora_operator.reconcile.status.task import task_status
from mlora_operator.reconcile.status.undecided import isolated_task_status, status_at_isolated
from mlora_operator.scheduling.admission import Admission
from mlora_operator.settings import NetworkPolicySettings
from mlora_worker.protocol import TaskPhase, TaskReport


class TaskStatuses:
    """The statuses of tasks, from what is known of them as far as it holds, and the ``news`` in them by key."""

    def __init__(
        self,
        accepted: Mapping[Key, Acceptance],
        recently_written: frozenset[str],
        known: Memoized[tuple[TaskStatus, tuple[Event, ...]]],
        policy: NetworkPolicySettings,
        now: datetime,
        isolation: Isolation,
    ) -> None:
        self._accepted, self._told_lately = accepted, recently_written
        self._known, self._stamp = known, timestamp(now)
        self.now, self.isolation = now, isolation
        self.policy = policy
        self.news: dict[Key, tuple[Event, ...]] = {}

    def status(
        self, task: Task, at: PipelineContext | None, place: Admission | None, reported: TaskReport | None
    ) -> TaskStatus:
        """See ``task_status``. One about which it cannot be said is isolated, and so is one that has not ended."""
        ended = reported is not None and reported.phase in (TaskPhase.SUCCEEDED, TaskPhase.FAILED)
        if task.key in self.isolation.tasks and not ended:
            return self.isolated_status(task)
        status = self.isolation.try_task(task, partial(self._status, task, at, place, reported), None)
        return status if status is not None else self.isolated_status(task)

    def of(self, task: Task, work: Callable[[], TaskStatus]) -> TaskStatus:
        """What ``work`` says. One about which that raises is isolated."""
        status = self.isolation.try_task(task, work, None)
        return status if status is not None else self.isolated_status(task)

    def unread(self, task: Task) -> TaskStatus:
        """Of one that trains though its spec is not understood, or though it is isolated."""
        return self.isolated_status(task) if task.key in self.isolation.tasks else task.status

    def isolated_status(self, task: Task) -> TaskStatus:
        return self._noted(task, isolated_task_status(task, self.isolation.tasks[task.key], self.now))

    def status_at(self, task: Task, fault: DecisionFault) -> TaskStatus:
        """Of a task whose pipeline is isolated."""
        return self._noted(task, status_at_isolated(task, fault, self.now))

    def _noted(self, task: Task, status: TaskStatus) -> TaskStatus:
        nothing: Sequence[Event] = ()
        told = partial(news, "LoRATask", task.key, task.uid, task.status.conditions, status.conditions)
        self.news[task.key] = tuple(self.isolation.try_task(task, told, nothing))
        return status

    def _status(
        self, task: Task, at: PipelineContext | None, place: Admission | None, reported: TaskReport | None
    ) -> TaskStatus:
        """Nothing but ``made_of`` goes into it."""
        acceptance, late = self._accepted[task.key], overdue(task, self.now)
        has = admission_message(task, place, words_stay=task.uid in self._told_lately)
        made_of = (task, at, acceptance.cause, has, reported, late)
        known = self._known.known(task.uid, made_of)
        if known is None:
            status = task_status(task, acceptance.cause, at, has, reported, late, self.now)
            held = task.status
            told = news("LoRATask", task.key, task.uid, held.conditions, status.conditions)
            known = status, (*told, *row_events(task, status))
            if not self._is_of_this_moment(status):
                self._known.keep(task.uid, made_of, known)
        status, told_of = known
        if (
            status is not task.status and status == task.status
        ):  # the write has come back: the very object, from now on
            status, told_of = self._known.keep(task.uid, made_of, (task.status, ()))
        if told_of:
            self.news[task.key] = told_of
        return status

    def _is_of_this_moment(self, status: TaskStatus) -> bool:
        times = (status.start_time, status.completion_time)
        return self._stamp in times or any(
            one.last_transition_time == self._stamp for one in status.conditions
        )
