"""What a pipeline's workers say of a plan that they do not understand, and which of its tasks are the cause. Pure.

Workers of today leave out what they do not understand of one task, and say so in their report. Those of the first builds
refuse the whole plan, and name the fields by the task's place in it: ``tasks.3.lora.type: ...``. What they named is not
sent to the same workers again, so that all others get their plan.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mlora_worker.protocol import Plan, TaskPlan

_FIELD = re.compile(r"\btasks\.(\d{1,9})\b\.?([^;\n]*)")
WORDS_SHOWN = 300  # characters
MOST_KEPT = 10_000  # tasks of a run: those that are deleted meanwhile are among them


class RefusedTask(NamedTuple):
    digest: bytes  # of its plan, as it was refused: the plan itself holds keys, and may be large
    words: str


@dataclass(frozen=True, slots=True)
class PlanRefusal:
    """``whole``: why the plan that was sent last was refused, where no task was the cause. ``tasks``: who was, by uid, of
    any plan that this ``run`` of the workers was sent."""

    run: str | None
    whole: str | None = None
    tasks: Mapping[str, RefusedTask] = field(default_factory=dict)

    def of(self, plan: TaskPlan) -> str | None:
        """Why these workers do not take the very same."""
        known = self.tasks.get(plan.uid)
        return known.words if known is not None and known.digest == _digest(plan) else None


def refused(before: PlanRefusal | None, plan: Plan, run: str | None, words: str) -> PlanRefusal:
    """After the workers refused ``plan`` with ``words``.

    These may quote what a user wrote, such as a key of a pattern. Where somebody wrote what looks like a task's place, the
    first place alone is believed: it stands before any quotation.
    """
    found = _FIELD.findall(words)
    if len(found) > 1 and _FIELD.search(plan.to_json()):
        found = found[:1]
    named: defaultdict[str, list[str]] = defaultdict(list)
    for number, about in found:
        if int(number) < len(plan.tasks):
            named[plan.tasks[int(number)].uid].append(about.strip())
    plans = {one.uid: one for one in plan.tasks}
    now = {
        uid: RefusedTask(_digest(plans[uid]), "; ".join(told)[:WORDS_SHOWN]) for uid, told in named.items()
    }
    known = _tasks(before, run)
    new = any(known.get(uid) != one for uid, one in now.items())  # else it was sent all the same
    kept = [(uid, one) for uid, one in known.items() if uid not in now][-MOST_KEPT:]
    return PlanRefusal(run, None if new else words[:WORDS_SHOWN], {**dict(kept), **now})


def taken(before: PlanRefusal | None, run: str | None) -> PlanRefusal | None:
    """After the workers took a plan."""
    tasks = _tasks(before, run)
    return PlanRefusal(run, None, tasks) if tasks else None


def _tasks(before: PlanRefusal | None, run: str | None) -> Mapping[str, RefusedTask]:
    return before.tasks if before is not None and before.run == run else {}


def _digest(plan: TaskPlan) -> bytes:
    return hashlib.sha256(Plan(generation=0, tasks=(plan,)).to_json().encode("utf-8", "replace")).digest()
