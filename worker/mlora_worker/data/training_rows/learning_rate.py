"""The learning rate of a step, as transformers' schedulers have it. Pure."""

from __future__ import annotations

import math

from mlora_worker.protocol import Schedule, Training


def warmup_steps(total: int, training: Training) -> int:
    """Of ``total`` steps in all; a fraction is rounded up, as transformers' Trainer does it."""
    if training.warmup_ratio is None:
        return training.warmup_steps
    return math.ceil(total * training.warmup_ratio)


def learning_rate(step: int, total: int, training: Training) -> float:
    """Learning rate that optimizer step ``step`` (1-based) of ``total`` uses.

    Equal to ``get_{constant,linear,cosine}_schedule_with_warmup``: a scheduler is advanced after each step,
    so step k uses its factor at k - 1, and with a warm-up the very first step's rate is zero. The factor is
    ``t / warmup`` in the warm-up, then 1, ``1 - p`` or ``(1 + cos(pi p)) / 2``, where p in [0, 1] is the part
    of the remaining steps that is done.
    """
    done = step - 1
    warmup = warmup_steps(total, training)
    if done < warmup:
        return training.learning_rate * done / warmup
    progress = (done - warmup) / max(1, total - warmup)
    match training.schedule:
        case Schedule.CONSTANT:
            factor = 1.0
        case Schedule.LINEAR:
            factor = 1.0 - progress
        case Schedule.COSINE:
            factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return training.learning_rate * max(0.0, factor)
