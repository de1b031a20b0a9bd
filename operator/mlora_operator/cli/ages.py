"""Spans of time as people read them in a column. Pure."""

from __future__ import annotations

from datetime import datetime

from mlora_operator.api.spans import span


def moment(text: str | None) -> datetime | None:
    """Of a time in a Kubernetes object; None where there is none."""
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None


def age(text: str | None, now: datetime) -> str:
    since = moment(text)
    return span((now - since).total_seconds()) if since is not None and since.tzinfo is not None else ""
