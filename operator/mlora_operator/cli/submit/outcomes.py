"""How submitted tasks end, and with which number the command ends then. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlora_operator.cli import exit_codes
from mlora_operator.cli.submit.conflict import tries_again
from mlora_operator.cli.task_table import row


class TaskResult(StrEnum):
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    REFUSED = "Rejected"  # by the operator, for longer than the user waits for a change
    GONE = "Deleted"  # by someone else


# The worst one decides; a task that failed tells more than one that someone deleted.
_CODES = (
    (TaskResult.FAILED, exit_codes.FAILED),
    (TaskResult.REFUSED, exit_codes.REFUSED),
    (TaskResult.GONE, exit_codes.NOT_FOUND),
)


def exit_code(outcomes: Iterable[TaskResult]) -> int:
    """0 when all succeeded; else that of the first kind of 1 failed, 7 rejected, 5 deleted that is among them."""
    among = set(outcomes)
    return next((code for outcome, code in _CODES if outcome in among), exit_codes.OK)


@dataclass(slots=True)
class ResultTracker:
    """What became of one task. ``refused_after``: seconds for which it may be rejected; the cause may go."""

    uid: str
    refused_after: float
    _rejected_since: float | None = None

    def of(self, task: Mapping[str, Any] | None, now: float) -> TaskResult | None:
        """None while it goes on. ``task`` is what has its name now."""
        if task is None or task["metadata"]["uid"] != self.uid:
            return TaskResult.GONE
        shown = row(task)
        if shown.succeeded:
            return TaskResult.SUCCEEDED
        if shown.failed:
            return None if tries_again(task) else TaskResult.FAILED
        if shown.state != "Rejected":
            self._rejected_since = None
            return None
        if self._rejected_since is None:
            self._rejected_since = now
        return TaskResult.REFUSED if now - self._rejected_since >= self.refused_after else None
