"""The operator's own last writes, until the watch has caught up with them.

Between the begin of a write and its echo an index shows the status of before. Deciding on that again would tell the same
event twice. This is a cache only: without it everything still ends in the same place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from mlora_operator.api.meta import Status
from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.state.snapshot import Pipeline, Task

S = TypeVar("S", bound=Status)


@dataclass(frozen=True, slots=True)
class _Write(Generic[S]):
    version: str  # resourceVersion that the decision saw
    status: S
    at: datetime


class WriteResult:
    """How one write comes out."""

    well = False

    def done(self) -> None:
        self.well = True


class AssumedStatuses(Generic[S]):
    """Statuses by uid. O(1) a question."""

    def __init__(self) -> None:
        self._writes: dict[str, _Write[S]] = {}
        self._gone: set[str] = set()

    @contextlib.contextmanager
    def writing(
        self, about: Task | Pipeline, status: S, at: datetime, *, counts_at_once: bool = True
    ) -> Iterator[WriteResult]:
        """While it lasts ``status`` is being written upon ``about`` as it was seen. Without ``done`` in it, or when it is
        broken off, nothing was written.
        """
        uid, before = about.uid, self._writes.get(about.uid)
        write, outcome = _Write(about.version, status, at), WriteResult()
        if counts_at_once:
            self._writes[uid] = write
        try:
            yield outcome
        finally:
            if outcome.well:
                self._writes[uid] = write
            elif self._writes.get(uid) is write:
                self._take_back(uid, before)

    def _take_back(self, uid: str, before: _Write[S] | None) -> None:
        if before is None:
            del self._writes[uid]
        else:
            self._writes[uid] = before

    def gone(self, uid: str) -> None:
        """The object was not there when it was written to."""
        self._gone.add(uid)

    def is_gone(self, uid: str) -> bool:
        return uid in self._gone

    def last_write(self, uid: str) -> datetime | None:
        write = self._writes.get(uid)
        return write.at if write is not None else None

    def lately(self, now: datetime, within: timedelta) -> frozenset[str]:
        """The uids of those that were written, or are being written, since then; not by a clock that was set back."""
        first = now - within
        return frozenset(uid for uid, write in self._writes.items() if first < write.at <= now)

    def status(self, uid: str, version: str, seen: S) -> S:
        """The newer of what was seen at ``version`` and what was written upon it."""
        write = self._writes.get(uid)
        return write.status if write is not None and write.version == version else seen

    def keep_only(self, uids: Iterable[str]) -> None:
        """Forget all others; an object that left the index needs no memory."""
        kept = set(uids)
        self._writes = {uid: write for uid, write in self._writes.items() if uid in kept}
        self._gone &= kept


def up_to_date_task(task: Task, written: AssumedStatuses[TaskStatus]) -> Task:
    status = written.status(task.uid, task.version, task.status)
    return replace(task, status=status) if status is not task.status else task


def up_to_date_pipeline(pipeline: Pipeline, written: AssumedStatuses[PipelineStatus]) -> Pipeline:
    status = written.status(pipeline.uid, pipeline.version, pipeline.status)
    return replace(pipeline, status=status) if status is not pipeline.status else pipeline
