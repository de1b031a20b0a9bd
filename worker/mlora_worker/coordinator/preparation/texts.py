"""Texts that plans name by digest: rows and chat templates of ConfigMaps. Pure but for what it remembers.

A ConfigMap holds up to a mebibyte, and many tasks may name one, or each its own. So a text travels once, and only when the
tasks that wait for it are next: whoever sends plans is told what is lacking (``Report.lacks``), a few at a time. It is kept
until the rows of all that were waiting for it are prepared.

All is called with the coordinator's lock held.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlora_worker.protocol import TaskPlan

AT_ONCE = 16  # texts that are asked for, or held for tasks whose rows are being prepared


class PlanTexts:
    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._waiting: dict[str, TaskPlan] = {}  # by uid, in the order of the plan
        self._here: dict[str, str] = {}  # by digest, for those that wait for another one, too
        self._in_use: dict[str, tuple[str, ...]] = {}  # digests by uid of tasks that are being prepared

    @property
    def lacks(self) -> tuple[str, ...]:
        """Digests of what is needed next."""
        used = {digest for digests in self._in_use.values() for digest in digests}
        room = self._at_once - len(used)
        found: dict[str, None] = {}
        for plan in self._waiting.values():
            if len(found) >= room:
                break
            found |= dict.fromkeys(digest for digest in plan.digests if digest not in self._here)
        return tuple(found)

    def wait(self, plan: TaskPlan) -> None:
        """For the texts of this one, which is new, or names others than before."""
        self._waiting[plan.uid] = plan

    def waits(self, uid: str) -> bool:
        return uid in self._waiting

    def reorder(self, uids: Iterable[str]) -> None:
        """As a new plan lists them."""
        self._waiting = {uid: self._waiting[uid] for uid in uids if uid in self._waiting}

    def take(self, digest: str, text: str) -> None:
        """One that is lacking; any other is dropped."""
        if digest in self.lacks:
            self._here[digest] = text

    def complete(self) -> tuple[TaskPlan, ...]:
        """The plans of all that have now what they waited for, which wait no longer."""
        ready = [plan for plan in self._waiting.values() if all(one in self._here for one in plan.digests)]
        filled = tuple(plan.with_texts(self._here) for plan in ready)
        for plan in ready:
            self._in_use[plan.uid] = plan.digests
            del self._waiting[plan.uid]
        wanted = {digest for plan in self._waiting.values() for digest in plan.digests}
        self._here = {digest: text for digest, text in self._here.items() if digest in wanted}
        return filled

    def done(self, uid: str) -> None:
        """Its rows are prepared, or nobody wants it any more."""
        self._in_use.pop(uid, None)
        self._waiting.pop(uid, None)
