"""Who makes a task's rows: what the coordinator asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Protocol

from mlora_worker.data.row_access import Reading
from mlora_worker.data.task_rows import TaskRows, task_rows
from mlora_worker.data.tokenizing.rendering import uses_date
from mlora_worker.protocol import StorageAccess, TaskPlan
from mlora_worker.storage.object_store.store import Store


class Cancelled(Exception):
    """Nobody wants the rows any more."""


class RowMaker(Protocol):
    """For many threads."""

    def uses_date(self, template: str | None) -> bool:
        """Whether rows may become other tokens on another day. ``template``: a task's own."""
        ...

    def make(self, task: TaskPlan, day: date | None, wanted: Callable[[], bool]) -> TaskRows:
        """Returns when they are there. ``day``: see ``prepare``. ``wanted``: asked before anything is done.

        Raises what ``task_rows`` raises, and Cancelled.
        """
        ...

    def cancel(self, uid: str) -> None:
        """Whoever makes rows of this task ends soon, with Cancelled. Returns at once."""
        ...


@dataclass(frozen=True, slots=True)
class RowsHere:
    """In the thread that asks: for programs and tests in which nothing trains meanwhile. Cannot be cancelled."""

    tokenizer: Any
    max_positions: int
    vocabulary: int  # rows of the model's embedding
    open_store: Callable[[StorageAccess], Store]
    reading: Reading = field(default_factory=Reading)

    def uses_date(self, template: str | None) -> bool:
        return uses_date(self.tokenizer, template)

    def make(self, task: TaskPlan, day: date | None, wanted: Callable[[], bool]) -> TaskRows:
        if not wanted():
            raise Cancelled(task.name)
        source = self.reading.source(self.open_store(task.storage), task.storage)
        cache = self.reading.cache(task.namespace)
        return task_rows(
            task, self.tokenizer, source, self.max_positions, day=day, cache=cache, vocabulary=self.vocabulary
        )

    def cancel(self, uid: str) -> None:
        del uid
