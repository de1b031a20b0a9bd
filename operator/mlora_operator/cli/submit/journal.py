"""What there is to tell of tasks as they go: each transition, and progress now and then. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlora_operator.cli.condition_words import words
from mlora_operator.cli.task_table import TaskRow, as_json, row

UNSEEN_AFTER = 30.0  # seconds without a status, after which it is told that nobody looks at the task


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One line for people, one object for programs."""

    text: str
    data: Mapping[str, Any]
    bad: bool = False
    good: bool = False


@dataclass(slots=True)
class _Told:
    """What was told of a task."""

    first: float
    conditions: dict[str, tuple[str, str, str]] = field(default_factory=dict)  # type: status, reason, message
    step: int = 0
    progress: float = float("-inf")  # when
    unseen: bool = False


class Journal:
    """Remembers what was told, so that each thing is told once. ``every``: seconds between two lines of progress."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._told: dict[tuple[str, str], _Told] = {}

    def entries(self, task: Mapping[str, Any], now: float) -> Iterator[JournalEntry]:
        """What is new of ``task``, an object as the API server gives it, or the same as before, later."""
        shown = row(task)
        told = self._told.setdefault((shown.namespace, shown.name), _Told(first=now))
        conditions = task.get("status", {}).get("conditions", [])
        if not task.get("status") and now - told.first >= UNSEEN_AFTER and not told.unseen:
            told.unseen = True
            yield _line(
                shown,
                "no operator has processed it yet: check that one is running and watches this namespace",
                "unseen",
            )
        for one in sorted(conditions, key=lambda one: str(one.get("lastTransitionTime", ""))):
            state = (one["status"], one.get("reason", ""), one.get("message", ""))
            former = told.conditions.get(one["type"])
            told.conditions[one["type"]] = state
            if former is None and state[0] == "False" and one["type"] in ("Succeeded", "Failed"):
                continue  # says only that it has not ended
            if one["type"] == "Finished":
                continue  # Succeeded or Failed tells the same, with the reason
            if former is None or former[:2] != state[:2]:
                yield _transition(shown, one)
        due = shown.step > told.step and now - told.progress >= self._every
        if due or (shown.finished and shown.step > told.step):
            told.step, told.progress = shown.step, now
            yield _progress(shown)


def _transition(shown: TaskRow, condition: Mapping[str, Any]) -> JournalEntry:
    type_, status = condition["type"], condition["status"]
    data = {"type": "condition", "namespace": shown.namespace, "name": shown.name}
    data |= {"condition": type_, "status": status}
    data |= {"reason": condition.get("reason", ""), "message": condition.get("message", "")}
    ended = status == "True"
    return JournalEntry(
        f"{shown.name}  {words(condition)}",
        data,
        bad=ended and type_ in ("Failed", "UploadBlocked"),
        good=ended and type_ == "Succeeded",
    )


def progress_text(shown: TaskRow) -> str:
    of = f"/{shown.total_steps}" if shown.total_steps else ""
    loss = f", loss {shown.loss}" if shown.loss else ""
    speed = f", {shown.tokens_per_second} tokens/s" if shown.tokens_per_second else ""
    return f"step {shown.step}{of}{loss}{speed}"


def _progress(shown: TaskRow) -> JournalEntry:
    return JournalEntry(f"{shown.name}  {progress_text(shown)}", {"type": "progress", **as_json(shown)})


def _line(shown: TaskRow, text: str, type_: str) -> JournalEntry:
    return JournalEntry(
        f"{shown.name}  {text}",
        {"type": type_, "namespace": shown.namespace, "name": shown.name, "message": text},
    )
