"""What there is to do about a task when its user wants it changed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlora_operator.cli.task_table import row

JSON = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChangeVerdict:
    """``act``: something is to be written. ``refused``: what the user wants cannot be; then nothing is written for any
    task. ``words`` go on after the task's name.
    """

    words: str
    act: bool = True
    refused: bool = False


def suspending(task: JSON) -> ChangeVerdict:
    shown = row(task)
    if shown.finished:
        return ChangeVerdict(f"has finished ({shown.state}): there is nothing to suspend", act=False)
    if task["spec"].get("suspend"):
        return ChangeVerdict("is suspended already", act=False)
    return ChangeVerdict("suspended; it releases the pipeline's memory after a checkpoint")


def resuming(task: JSON) -> ChangeVerdict:
    if not task["spec"].get("suspend"):
        return ChangeVerdict("is not suspended", act=False)
    if row(task).finished:
        return ChangeVerdict("resumed, but it has finished: it does not train again")
    return ChangeVerdict("resumed; it continues from its newest checkpoint")


def retrying(task: JSON) -> ChangeVerdict:
    shown = row(task)
    if shown.succeeded:
        words = "has succeeded: to train it again, delete it and apply it again"
        return ChangeVerdict(words, act=False, refused=True)
    if not shown.failed:
        return ChangeVerdict(f"has not failed: it is {shown.state}", act=False, refused=True)
    if task["spec"].get("suspend"):
        return ChangeVerdict("will be retried once it is resumed, since it is suspended")
    return ChangeVerdict("retried; it continues from its newest checkpoint, if it has one")


def deleting(task: JSON) -> ChangeVerdict:
    return ChangeVerdict(f"deleted; {stays(task)}")


def stays(task: JSON) -> str:
    """What is in the store and outlasts the task."""
    shown, output = row(task), (task["spec"].get("output") or {}).get("uri", "").rstrip("/")
    if shown.succeeded:
        return f"its adapter stays at {shown.adapter or output}"
    step = (task.get("status") or {}).get("checkpointStep")
    if step:
        place = f"{output}/checkpoints, or where its pipeline keeps checkpoints"
        return f"its checkpoint of step {step} stays in {place}"
    return f"what it has written below {output} stays"
