"""Who counts what the loop does. Whoever that is hears of a thing once it is done, must be quick, and does no I/O."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.state.snapshot import Pipeline, Task


class Observer(Protocol):
    def passed(self, whole: float, deciding: float) -> None:
        """A pass came to its end: seconds of all of it, and of the decision alone."""

    def pass_failed(self) -> None:
        """A pass ended with an error that nobody expected."""

    def failing(self, times: int) -> None:
        """So many passes have failed in a row by now; 0: the last one succeeded."""

    def isolated(self, tasks: int, pipelines: int) -> None:
        """About so many objects nothing could be decided in the last pass."""

    def write_failed(self) -> None:
        """One write of a pass was not done; the next pass tries again."""

    def task_written(self, task: Task, status: TaskStatus, now: datetime) -> None:
        """``status`` stands in the place of ``task.status``."""

    def pipeline_written(self, pipeline: Pipeline, status: PipelineStatus) -> None:
        """``status`` stands in the place of ``pipeline.status``."""


class NoObserver:
    """Where nothing is counted."""

    def passed(self, whole: float, deciding: float) -> None: ...
    def pass_failed(self) -> None: ...
    def failing(self, times: int) -> None: ...
    def isolated(self, tasks: int, pipelines: int) -> None: ...
    def write_failed(self) -> None: ...
    def task_written(self, task: Task, status: TaskStatus, now: datetime) -> None: ...
    def pipeline_written(self, pipeline: Pipeline, status: PipelineStatus) -> None: ...
