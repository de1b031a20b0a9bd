"""How long a task will still train. Pure."""

from __future__ import annotations

from mlora_operator.api.spans import span
from mlora_operator.reconcile.state.snapshot import Task
from mlora_worker.protocol import TaskReport
from mlora_worker.stream.planner import rows_per_step

_LONGEST = 315_360_000  # seconds, ten years: a speed of next to nothing is none


def eta(task: Task, reported: TaskReport | None) -> str | None:
    """Steps to do, times the tokens of a mean step, over the task's tokens a second. Neither the upload nor a wait for
    memory is in it. No clock goes into it: it moves with the step alone, and costs no write of its own.
    """
    if reported is None or task.spec is None or not reported.total_steps or not reported.tokens_per_second:
        return None
    data = reported.data or task.status.data
    if data is None or not data.used or not data.tokens or reported.tokens_per_second < 0:
        return None
    steps_of_epoch = -(-data.used // rows_per_step(task.spec.training))
    left = (reported.total_steps - reported.step) * data.tokens / steps_of_epoch / reported.tokens_per_second
    return span(left) if left < _LONGEST else None
