"""Conditions of tasks and pipelines in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
