"""When a plan may be sent: long enough after the one before, and not again what its coordinator refused a moment ago."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from mlora_operator.reconcile.cluster.throttle import NOTHING, Pace
from mlora_operator.reconcile.state.snapshot import Key
from mlora_worker.protocol import Plan, TaskPlan

ASK_AGAIN = timedelta(seconds=30)  # what is refused stays so until workers or tasks are others


@dataclass(frozen=True, slots=True)
class _Refused:
    tasks: tuple[TaskPlan, ...]
    run: str | None  # of the workers
    at: datetime


class PlanThrottle:
    """By pipeline. A clock that was set back holds nothing up for longer."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._next: dict[Key, datetime] = {}
        self._refused: dict[Key, _Refused] = {}

    def wait(self, key: Key, plan: Plan, size: int, run: str | None, now: datetime) -> timedelta:
        """How long this plan has to wait. If not at all, it counts as sent now."""
        known = self._refused.get(key)
        if known is not None and (known.tasks, known.run) == (plan.tasks, run):
            left = known.at + ASK_AGAIN - now
            if NOTHING < left <= ASK_AGAIN:
                return left
        apart = len(plan.tasks) * self._pace.plan_for_each + size / 2**20 * self._pace.plan_for_mebibyte
        left = self._next.get(key, now) - now
        if NOTHING < left <= apart:
            return left
        self._next[key] = now + apart
        return NOTHING

    def refused(self, key: Key, plan: Plan, run: str | None, now: datetime) -> None:
        self._refused[key] = _Refused(plan.tasks, run, now)

    def forget_past(self, now: datetime) -> None:
        self._next = {key: at for key, at in self._next.items() if at > now}
        self._refused = {key: one for key, one in self._refused.items() if now - one.at < ASK_AGAIN}
