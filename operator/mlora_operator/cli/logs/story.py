"""What happened to a task in the order of time: its conditions, its events, its progress. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mlora_operator.cli.ages import moment
from mlora_operator.cli.condition_words import tells_something, words
from mlora_operator.cli.submit.journal import progress_text
from mlora_operator.cli.task_table import row
from mlora_worker.lines import headed, one_line

JSON = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoryLine:
    """``time`` as the API server wrote it; empty where it is now."""

    kind: str  # condition, event or progress
    time: str
    text: str
    bad: bool = False
    good: bool = False

    @property
    def clock(self) -> str:
        when = moment(self.time)
        return when.strftime("%Y-%m-%d %H:%M:%S") if when is not None else ""

    def __str__(self) -> str:
        return f"{one_line(self.clock)}  {headed(self.text)}"


class Story:
    """Remembers what was told, so that each thing is told once. ``every``: seconds between two lines of progress."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._told: set[StoryLine] = set()
        self._step = 0
        self._progress_at = float("-inf")

    def news(self, task: JSON, events: Sequence[JSON], now: datetime) -> Iterator[StoryLine]:
        """What is new since the last call, oldest first, then how far the task is."""
        for line in told_of(task, events):
            if line not in self._told:
                self._told.add(line)
                yield line
        shown = row(task)
        due = shown.finished or now.timestamp() - self._progress_at >= self._every
        if shown.step > self._step and due:
            self._step, self._progress_at = shown.step, now.timestamp()
            yield StoryLine("progress", now.isoformat(timespec="seconds"), progress_text(shown))


def told_of(task: JSON, events: Sequence[JSON]) -> list[StoryLine]:
    """Conditions, and events that say something else than these; of the same second, conditions first."""
    conditions = list(filter(tells_something, (task.get("status") or {}).get("conditions") or []))
    said = {one.get("message") for one in conditions} - {None, ""}
    lines = [_of_condition(one) for one in conditions]
    lines += [_of_event(one) for one in events if one.get("message") not in said]
    return sorted(lines, key=lambda line: line.clock)


def _of_condition(one: JSON) -> StoryLine:
    ended = one.get("status") == "True"
    return StoryLine(
        "condition",
        one.get("lastTransitionTime") or "",
        words(one),
        bad=ended and one["type"] in ("Failed", "UploadBlocked"),
        good=ended and one["type"] == "Succeeded",
    )


def _of_event(one: JSON) -> StoryLine:
    count = one.get("count") or 1
    often = (
        f" ({count} times since {one['firstTimestamp']})" if count > 1 and one.get("firstTimestamp") else ""
    )
    time = one.get("lastTimestamp") or one.get("eventTime") or one.get("firstTimestamp") or ""
    text = f"{one.get('reason', '')}: {one.get('message', '')}{often}"
    return StoryLine("event", time, text, bad=one.get("type") == "Warning")
