"""What stands in a table of tasks or of pipelines. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mlora_operator.api import conditions
from mlora_operator.cli.ages import age
from mlora_operator.cli.task_table import row

JSON = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ShownColumn:
    name: str
    text: Callable[[JSON, datetime], str]
    wide: bool = False  # only where it is asked for


def _progress(task: JSON) -> str:
    shown = row(task)
    return f"{shown.step}/{shown.total_steps}" if shown.total_steps else ""


def _created(found: JSON, now: datetime) -> str:
    return age(found["metadata"].get("creationTimestamp"), now)


def _status(found: JSON, field: str) -> str:
    value = (found.get("status") or {}).get(field)
    return "" if value is None else str(value)


NAMESPACE = ShownColumn("NAMESPACE", lambda found, _: found["metadata"].get("namespace", ""))

TASKS = (
    ShownColumn("NAME", lambda task, _: row(task).name),
    ShownColumn("STATE", lambda task, _: row(task).state),
    ShownColumn("REASON", lambda task, _: row(task).reason),
    ShownColumn("STEP", lambda task, _: _progress(task)),
    ShownColumn("LOSS", lambda task, _: row(task).loss or ""),
    ShownColumn("ETA", lambda task, _: row(task).eta or ""),
    ShownColumn("BASE MODEL", lambda task, _: task["spec"].get("baseModel", "")),
    ShownColumn("AGE", _created),
    ShownColumn("PRIORITY", lambda task, _: str(row(task).priority), wide=True),
    ShownColumn("PIPELINE", lambda task, _: _status(task, "pipeline"), wide=True),
    ShownColumn("TOKENS/S", lambda task, _: row(task).tokens_per_second or "", wide=True),
    ShownColumn("ADAPTER", lambda task, _: row(task).adapter or "", wide=True),
)


def _ready(pipeline: JSON) -> str:
    return f"{_status(pipeline, 'readyReplicas') or 0}/{pipeline['spec'].get('stages', 1)}"


def _reason(pipeline: JSON) -> str:
    """Of Ready; workers that are ready and take no plan would look well."""
    held = {one["type"]: one for one in (pipeline.get("status") or {}).get("conditions") or []}
    rejects = held.get(conditions.PLAN_REJECTED, {}).get("status") == "True"
    reason: str = held.get(conditions.PLAN_REJECTED if rejects else conditions.READY, {}).get("reason", "")
    return reason


PIPELINES = (
    ShownColumn("NAME", lambda pipeline, _: pipeline["metadata"]["name"]),
    ShownColumn("STATE", lambda pipeline, _: _status(pipeline, "state") or "Pending"),
    ShownColumn("REASON", lambda pipeline, _: _reason(pipeline)),
    ShownColumn("READY", lambda pipeline, _: _ready(pipeline)),
    ShownColumn("ACTIVE", lambda pipeline, _: _status(pipeline, "activeTasks")),
    ShownColumn("WAITING", lambda pipeline, _: _status(pipeline, "waitingTasks")),
    ShownColumn("UPDATE", lambda pipeline, _: _status(pipeline, "update")),
    ShownColumn("BASE MODEL", lambda pipeline, _: (pipeline["spec"].get("model") or {}).get("name", "")),
    ShownColumn("AGE", _created),
    ShownColumn(
        "UPDATING", lambda pipeline, now: age(_status(pipeline, "updatingSince") or None, now), wide=True
    ),
    ShownColumn(
        "DTYPE", lambda pipeline, _: (pipeline["spec"].get("model") or {}).get("dtype") or "", wide=True
    ),
)


def table(
    columns: Sequence[ShownColumn],
    objects: Sequence[JSON],
    now: datetime,
    *,
    wide: bool,
    everywhere: bool,
) -> tuple[list[str], list[list[str]]]:
    """Names of the columns, and the rows in the objects' order."""
    shown = [
        *([NAMESPACE] if everywhere else []),
        *(column for column in columns if wide or not column.wide),
    ]
    return [column.name for column in shown], [
        [column.text(found, now) for column in shown] for found in objects
    ]
