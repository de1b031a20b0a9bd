"""What of a status has to be written: the difference, and for mere progress not too often. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from mlora_operator.api.meta import Status

PROGRESS = frozenset(
    {
        "step",
        "progress",
        "loss",
        "tokensPerSecond",
        "checkpointStep",
        "evaluationLoss",
        "bestStep",
        "bestEvaluationLoss",
    }
)
PROGRESS_EVERY = timedelta(seconds=5)  # a status is read by people; each write goes through etcd


def difference(before: Status, after: Status) -> dict[str, Any]:
    """JSON merge patch that turns one status into the other; empty when they are equal. Lists are whole
    values.
    """
    return _merge_patch(_document(before), _document(after))


def is_due(patch: Mapping[str, Any], last_write: datetime | None, now: datetime) -> bool:
    """A change of anything but progress is written at once."""
    if not patch:
        return False
    if last_write is None or not PROGRESS.issuperset(patch):
        return True
    return now - last_write >= PROGRESS_EVERY


def _document(status: Status) -> dict[str, Any]:
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def _merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            inner = _merge_patch(old, value)
            if inner:
                patch[key] = inner
        elif old != value:
            patch[key] = value
    return patch
