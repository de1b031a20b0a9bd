"""What of a status has to be written: the difference, and when. Pure.

A status is read by people and by tools that wait for a condition; each write goes through the API server's store and to
everybody who watches. So what turns a condition is written at once, and what is likely to be overtaken waits a little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mlora_operator.api import conditions as c
from mlora_operator.api.meta import Condition, Status

PROGRESS = frozenset(
    {
        "step",
        "progress",
        "loss",
        "tokensPerSecond",
        "eta",
        "checkpointStep",
        "evaluationLoss",
        "bestStep",
        "bestEvaluationLoss",
        "rewardMargin",
        "rewardAccuracy",
        "chosenLogps",
        "rejectedLogps",
        "kl",
    }
)

# Reasons of a task that waits in a queue: their words change with everybody who comes and goes before it.
QUEUED = frozenset({c.REASON_WAITING_FOR_MEMORY, c.REASON_NAMESPACE_LIMIT_REACHED})
NOTHING = timedelta(0)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long after an object's last write a change of it may wait, by what changes.

    ``progress``: mere numbers; of a task that has trained for long a tenth of that time, at most ``progress_most``.
    ``passing``: what turns no condition, such as a phase that lasts a second; and that a task has a place, which training
    follows. ``words``: the message alone of a task in a queue. ``plan_for_each``: how long after a plan the next one for
    the same coordinator may wait, for each task in it, since all of them are written down, sent and read each time;
    ``plan_for_mebibyte``: the same for its size.
    """

    progress: timedelta = timedelta(seconds=5)
    progress_most: timedelta = timedelta(seconds=5)
    passing: timedelta = NOTHING
    words: timedelta = NOTHING
    plan_for_each: timedelta = NOTHING
    plan_for_mebibyte: timedelta = NOTHING


PROMPT = Pace()  # where a write costs nothing
API_SERVER = Pace(
    progress_most=timedelta(seconds=30),
    passing=timedelta(seconds=2),
    words=timedelta(seconds=60),
    plan_for_each=timedelta(milliseconds=1),
    plan_for_mebibyte=timedelta(milliseconds=250),
)


def difference(before: Status, after: Status) -> dict[str, Any]:
    """JSON merge patch that turns one status into the other; empty when they are equal. Lists are whole
    values.
    """
    changed = {name for name in type(after).model_fields if getattr(before, name) != getattr(after, name)}
    return _merge_patch(_document(before, changed), _document(after, changed)) if changed else {}


def pause(
    patch: Mapping[str, Any],
    before: tuple[Condition, ...],
    after: tuple[Condition, ...],
    trained: timedelta,
    pace: Pace,
) -> timedelta:
    """How long after the last write a change must wait that ``patch`` writes; ``trained``: since the task's start.

    1. A condition that comes, goes or turns does not wait, nor does the answer to a changed spec, nor where a task is; but
       ``Admitted`` that comes to be true does.
    2. Of what is left, numbers that move wait longest, then words of a queue.
    """
    if not patch.keys().isdisjoint(("observedGeneration", "pipeline")) or _turned(before, after):
        return NOTHING
    if "conditions" not in patch and PROGRESS.issuperset(patch):
        return max(pace.progress, min(pace.progress_most, trained / 10))
    if PROGRESS.issuperset(patch.keys() - {"conditions"}) and _only_queue_words(before, after):
        return pace.words
    return pace.passing


def _turned(before: tuple[Condition, ...], after: tuple[Condition, ...]) -> bool:
    held = {one.type: one.status for one in before}
    wished = {one.type: one.status for one in after}
    if wished.get(c.ADMITTED) == "True" and c.ADMITTED in held:
        held[c.ADMITTED] = "True"
    return held != wished


def _only_queue_words(before: tuple[Condition, ...], after: tuple[Condition, ...]) -> bool:
    held = {one.type: one for one in before}
    changed = [one for one in after if one != held.get(one.type)]
    return all(one.reason in QUEUED and one.reason == held[one.type].reason for one in changed)


def _document(status: Status, fields: set[str]) -> dict[str, Any]:
    return status.model_dump(mode="json", by_alias=True, exclude_none=True, include=fields)


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
