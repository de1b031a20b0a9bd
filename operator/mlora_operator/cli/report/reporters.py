"""The reporters of one command, told of a task in the cluster as it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mlora_operator.cli.task_table import row
from mlora_operator.reporting.curves import LOSS, Point, Reporter, Run
from mlora_operator.reporting.targets import ReportTarget

if TYPE_CHECKING:
    from mlora_operator.cli.kube.client import JSON  # the cluster's client takes seconds to load

Open = Callable[[ReportTarget, Run, Mapping[str, str]], Reporter]


class Reports:
    """Opened when it is known which run it is; anew for another one."""

    def __init__(self, targets: Sequence[ReportTarget], open_: Open, environment: Mapping[str, str]) -> None:
        self._targets, self._open, self._environment = targets, open_, environment
        self._uid: str | None = None
        self._reporters: list[tuple[str, Reporter]] = []

    def of(self, run: Run) -> list[tuple[str, Reporter]]:
        """By kind. Raises ReportError."""
        if self._uid != run.uid:
            self._reporters = [(one.kind, self._open(one, run, self._environment)) for one in self._targets]
            self._uid = run.uid
        return self._reporters

    def seen(self, task: JSON) -> None:
        """A LoRATask as it is now: its status has the newest loss alone, with four digits. Raises ReportError."""
        shown = row(task)
        run = Run(task["metadata"]["uid"], shown.namespace, shown.name, task["spec"]["baseModel"])
        if shown.failed:
            for _, reporter in self.of(run):
                reporter.failed()
        elif shown.loss is not None and not shown.succeeded:
            for _, reporter in self.of(run):
                reporter.add([Point(LOSS, shown.step, float(shown.loss))])
