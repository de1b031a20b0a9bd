"""Conditions of tasks and pipelines in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlora_operator.api import conditions


def words(condition: Mapping[str, Any]) -> str:
    """Such as ``not Admitted (WaitingForMemory): tasks that come first fill the memory``."""
    type_, status = condition["type"], condition.get("status")
    reason, message = condition.get("reason") or "", condition.get("message") or ""
    what = (
        type_
        if status == "True"
        else f"{'not ' if status == 'False' else ''}{type_}" + "?" * (status == "Unknown")
    )
    why = f" ({reason})" if reason not in ("", type_) else ""
    return f"{what}{why}" + (f": {message}" if message else "")


def tells_something(condition: Mapping[str, Any]) -> bool:
    """Not one that says only that the task has not ended so, nor the one that repeats how it ended."""
    type_ = condition["type"]
    if type_ == conditions.FINISHED:
        return False
    return not (type_ in (conditions.SUCCEEDED, conditions.FAILED) and condition.get("status") == "False")
