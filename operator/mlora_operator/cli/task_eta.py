"""How long a task will still train, as far as its object tells. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def seconds_left(task: Mapping[str, Any]) -> float | None:
    """Steps to do, times the tokens of a usual step, over the task's tokens a second. None: it does not train, or the
    status has not all of it.

    A usual step is the mean one of a pass over the rows. Only steps count: not the upload, nor a wait for memory.
    """
    status, training = task.get("status") or {}, task["spec"].get("training") or {}
    if status.get("state") != "Training":
        return None
    data = status.get("data") or {}
    steps: int = (status.get("totalSteps") or 0) - (status.get("step") or 0)
    rows, tokens = data.get("used") or 0, data.get("tokens") or 0
    rate = _number(status.get("tokensPerSecond"))
    if steps < 0 or not rows or not tokens or rate <= 0:
        return None
    rows_of_a_step = training.get("batchSize", 8) * training.get("gradientAccumulationSteps", 1)
    tokens_of_a_step: float = tokens / math.ceil(rows / rows_of_a_step)
    return steps * tokens_of_a_step / rate


def _number(text: object) -> float:
    """0 where the text is not a number: it comes from a worker."""
    try:
        value = float(str(text))
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
