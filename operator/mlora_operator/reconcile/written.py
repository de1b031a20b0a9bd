"""The operator's own last writes, until the watch has caught up with them.

Between a write and its echo an index shows the status of before. Deciding on that again would tell the same
event twice. This is a cache only: without it everything still ends in the same place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Generic, TypeVar

from mlora_operator.api.meta import Status
from mlora_operator.api.pipeline import PipelineStatus
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.snapshot import Pipeline, Task

S = TypeVar("S", bound=Status)


@dataclass(frozen=True, slots=True)
class _Write(Generic[S]):
    version: str  # resourceVersion that the decision saw
    status: S
    at: datetime


class Written(Generic[S]):
    """Statuses by uid. O(1) a question."""

    def __init__(self) -> None:
        self._writes: dict[str, _Write[S]] = {}
        self._gone: set[str] = set()

    def wrote(self, uid: str, version: str, status: S, at: datetime) -> None:
        self._writes[uid] = _Write(version, status, at)

    def gone(self, uid: str) -> None:
        """The object was not there when it was written to."""
        self._gone.add(uid)

    def is_gone(self, uid: str) -> bool:
        return uid in self._gone

    def last_write(self, uid: str) -> datetime | None:
        write = self._writes.get(uid)
        return write.at if write is not None else None

    def status(self, uid: str, version: str, seen: S) -> S:
        """The newer of what was seen at ``version`` and what was written upon it."""
        write = self._writes.get(uid)
        return write.status if write is not None and write.version == version else seen

    def keep_only(self, uids: Iterable[str]) -> None:
        """Forget all others; an object that left the index needs no memory."""
        kept = set(uids)
        self._writes = {uid: write for uid, write in self._writes.items() if uid in kept}
        self._gone &= kept


def up_to_date_task(task: Task, written: Written[TaskStatus]) -> Task:
    status = written.status(task.uid, task.version, task.status)
    return replace(task, status=status) if status is not task.status else task


def up_to_date_pipeline(pipeline: Pipeline, written: Written[PipelineStatus]) -> Pipeline:
    status = written.status(pipeline.uid, pipeline.version, pipeline.status)
    return replace(pipeline, status=status) if status is not pipeline.status else pipeline
