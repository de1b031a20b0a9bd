"""Whether what a checkpoint says can be true, and is of the task that takes it up. Pure.

Whoever may write to a task's output may have written it: sums and sizes in a manifest only say that it is whole. What is
wrong here is one task's failure; in the stream it would be everybody's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from mlora_worker.storage.artifacts.task_state import (
    DAY,
    PREFIXES,
    CheckpointMismatch,
    Fact,
    Fingerprint,
    SavedProgress,
    TaskState,
    Wanted,
)

_TOTAL_STEPS = "training.totalSteps"  # a fact
_ELEMENT = 4  # bytes: float32
_HEADER = 2**20  # bytes of the tensors' file, beside what names and shapes take
_NAME = 512  # bytes of a name with its shape
LARGEST_HISTORY = 32 * 2**20  # bytes of the lines of losses


def check_fingerprint(found: Fingerprint, wanted: Fingerprint, where: str) -> None:
    """Raises ``CheckpointMismatch`` that names the first fact that differs.

    The day counts where both have it: workers from before it was a fact wrote none, and what the rows became is a fact
    of its own.
    """
    passed_over = set() if DAY in found and DAY in wanted else {DAY}
    for name in sorted((found.keys() | wanted.keys()) - passed_over):
        one, other = _plain(found.get(name)), _plain(wanted.get(name))
        if one != other:
            raise CheckpointMismatch(
                f"the checkpoint at {where} was written with {name} {_shown(one)}, the task has {_shown(other)}; "
                f"delete the checkpoint to start from the beginning, or choose another output.uri"
            )


def check_progress(progress: SavedProgress, wanted: Fingerprint, where: str) -> None:
    """Raises ``CheckpointMismatch`` unless it is of a task with these facts."""
    check_fingerprint(progress.fingerprint, wanted, where)
    total = wanted.get(_TOTAL_STEPS, progress.total_steps)
    if progress.total_steps != total:
        raise contradiction(where, f"totalSteps is {progress.total_steps}, the task has {total}")


def check_agreement(progress: SavedProgress, where: str) -> None:
    """Raises ``CheckpointMismatch`` where its numbers contradict each other."""
    step, last, evaluation = progress.step, progress.last, progress.evaluation
    checks = [
        ("step", step, progress.total_steps, "totalSteps"),
        ("updates", progress.updates, step, "step"),
    ]
    if last is not None:
        checks.append(("last.tokens", last.tokens, progress.tokens, "tokens"))
    if evaluation is not None:
        checks += [
            (f"evaluation.{name}.step", record.step, step, "step")
            for name, record in (("last", evaluation.last), ("best", evaluation.best))
            if record is not None
        ]
        checks.append(("evaluation.since", evaluation.since, step, "step"))
    for name, number, most, limit in checks:
        if number > most:
            raise contradiction(where, f"{name} is {number}, {limit} is {most}")
    if not progress.updates:
        raise contradiction(where, "updates is 0, and each step makes one")
    if last is not None and last.step != step:
        raise contradiction(where, f"last.step is {last.step}, step is {step}")


def most_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Of a state's file, for an adapter with tensors of these shapes."""
    copies = len(PREFIXES) + 1  # and the adapter that evaluated best
    numbers = sum(map(math.prod, shapes.values()))
    return copies * (_ELEMENT * numbers + _NAME * len(shapes)) + LARGEST_HISTORY + _HEADER


def check_tensors(state: TaskState, task: Wanted, where: str) -> None:
    """Raises ``CheckpointMismatch`` unless it has exactly the tensors that ``task`` has."""
    shapes = task.shapes
    wanted = {prefix + name: shape for prefix in task.prefixes for name, shape in shapes.items()}
    for tensors, expected in ((state.tensors, wanted), (state.best, shapes if state.best else {})):
        if tensors.keys() != expected.keys():
            odd = sorted(tensors.keys() ^ expected.keys())
            raise contradiction(where, f"{odd[0][:200]} is unexpected or missing")
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != expected[name] or tensor.dtype != torch.float32:
                raise contradiction(
                    where,
                    f"{name} is {tensor.dtype} of shape {list(tensor.shape)}, not {list(expected[name])}",
                )
    if len(state.history) > LARGEST_HISTORY:
        raise contradiction(where, f"its losses have {len(state.history)} bytes")


def contradiction(where: str, what: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"{where} is not a valid state of the task: {what}; delete the checkpoint to start from the beginning, or "
        f"choose another output.uri"
    )


def _plain(fact: Fact | list[str]) -> Fact:
    return tuple(fact) if isinstance(fact, list) else fact


def _shown(fact: Fact) -> str:
    text = "none" if fact is None else ", ".join(fact) if isinstance(fact, tuple) else str(fact)
    return text if len(text) <= 500 else f"{text[:500]}..."
