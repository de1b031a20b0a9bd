"""The statuses of objects that are isolated (``state.isolation``): what they have, and a condition that says so. Pure."""

from __future__ import annotations

from datetime import datetime

from mlora_operator.api import conditions as c
from mlora_operator.api.meta import Condition
from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.state.decision import DecisionFault
from mlora_operator.reconcile.state.isolation import in_words
from mlora_operator.reconcile.state.snapshot import Pipeline, Task, condition
from mlora_operator.reconcile.status.conditions import DesiredCondition, conclude


def isolated_task_status(task: Task, fault: DecisionFault, now: datetime) -> TaskStatus:
    """Its status with the word that it is isolated; all else that it says stays."""
    return _with_message(task, in_words(fault), now)


def status_at_isolated(task: Task, fault: DecisionFault, now: datetime) -> TaskStatus:
    """Of a task whose pipeline is isolated. One that has been told of its pipeline keeps what it has."""
    if condition(task.status.conditions, c.ACCEPTED) is not None:
        return task.status
    return _with_message(
        task,
        f"{fault.about} serves it, but the operator cannot reconcile that pipeline at present (see its condition "
        f"Ready). No action is needed here: the operator keeps retrying",
        now,
    )


def isolated_pipeline_status(pipeline: Pipeline, fault: DecisionFault, now: datetime) -> PipelineStatus:
    """Its status with the word that it is isolated; all else that it says stays."""
    held = pipeline.status
    words = (
        f"the operator cannot reconcile this pipeline ({fault.words}): its workers and tasks stay unchanged, and the "
        f"operator keeps retrying. See the operator's log; if its workers report invalid values, delete their pods, "
        f"and new ones are started"
    )
    wanted = DesiredCondition(c.READY, "Unknown", c.REASON_RECONCILE_ERROR, words)
    conditions = _with(held.conditions, wanted, pipeline.generation, now)
    return held.model_copy(update={"conditions": conditions, "state": "Failed"})


def _with_message(task: Task, words: str, now: datetime) -> TaskStatus:
    held = task.status
    accepted = condition(held.conditions, c.ACCEPTED)
    wanted = DesiredCondition(
        c.ACCEPTED, accepted.status if accepted is not None else "Unknown", c.REASON_RECONCILE_ERROR, words
    )
    status = held.model_copy(
        update={
            "conditions": _with(held.conditions, wanted, task.generation, now),
            "state": held.state or "Pending",
            "reason": held.reason or c.REASON_RECONCILE_ERROR,
        }
    )
    return held if status == held else status


def _with(
    held: tuple[Condition, ...], wanted: DesiredCondition, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """``held`` with one condition as it is wished for, first; the others are not touched."""
    others = (one for one in held if one.type != wanted.type)
    return (*conclude(held, (wanted,), generation, now), *others)
