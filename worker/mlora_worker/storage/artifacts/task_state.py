"""What a task is at the end of a step, in memory. How it lies in a store: ``checkpoint.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from mlora_worker.bounds import (
    MOST_MODULES,
    Amount,
    Count,
    LongName,
    Name,
    Real,
    Seconds,
    Whole,
    Word,
)
from mlora_worker.protocol import EvaluationRecord, FailureReason, Message, StepRecord

PARAMETERS, FIRST_MOMENTS, SECOND_MOMENTS = "parameters.", "firstMoments.", "secondMoments."
PREFIXES = (PARAMETERS, FIRST_MOMENTS, SECOND_MOMENTS)
# In the same file: the adapter that evaluated best, and the lines of losses.
_BEST, _HISTORY = "best.", "history"

FactText = Annotated[str, Field(max_length=4096)]
Fact = (
    FactText
    | Whole
    | Real
    | bool
    | Annotated[tuple[FactText, ...], Field(max_length=2 * MOST_MODULES)]
    | None
)
Fingerprint = Mapping[str, Fact]  # all that decides a task's result, by a name that a user understands

DAY = "dataset.date"  # on which its rows were rendered first, where the template writes the date
DETECTED_FORMAT = "dataset.format"  # of its first rows, where the task names none


class CheckpointMismatch(Exception):
    """The checkpoint belongs to another task, and the message names what differs; or to another version of the worker."""

    reason = FailureReason.CHECKPOINT_MISMATCH


class EvaluationProgress(Message):
    """What further evaluations are compared with."""

    last: EvaluationRecord | None = None
    best: EvaluationRecord | None = None  # the lowest loss
    reference: Real | None = None  # the loss that early stopping compares with
    since: Amount = 0  # evaluations since that
    stopped: bool = False  # early: no step follows


class SavedProgress(Message):
    """Where a task stands after ``step`` optimizer steps."""

    step: Count
    total_steps: Count
    updates: Amount  # AdamW's count: steps without a supervised token make none
    epoch: Amount  # of the next step, from 0
    epoch_step: Amount  # the next step's place in its epoch, from 0
    learning_rate: Real  # of the last step
    last: StepRecord | None
    tokens: Amount
    seconds: Seconds  # of training
    evaluation: EvaluationProgress | None = None
    task_uid: Word
    task: LongName  # namespace/name
    fingerprint: Annotated[dict[Name, Fact], Field(max_length=1024)]


@dataclass(frozen=True, slots=True)
class TaskState:
    """A whole checkpoint in memory. ``tensors``: by PEFT's names behind one of ``PREFIXES``, of all stages. ``best``: the
    adapter that evaluated best, by PEFT's names, where it is kept. ``history``: lines of the losses' file.
    """

    progress: SavedProgress
    tensors: Mapping[str, Tensor]
    best: Mapping[str, Tensor] = field(default_factory=dict)
    history: bytes = b""

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), *self.best.values()))

    def filed(self) -> dict[str, Tensor]:
        """All of it but ``progress``, as it lies in the file."""
        found = dict(self.tensors) | {_BEST + name: tensor for name, tensor in self.best.items()}
        if self.history:
            found[_HISTORY] = torch.frombuffer(bytearray(self.history), dtype=torch.uint8)
        return found


def state_of(progress: SavedProgress, filed: dict[str, Tensor]) -> TaskState:
    """The opposite of ``filed``. Raises ValueError for lines that are none."""
    history = filed.pop(_HISTORY, None)
    if history is not None and (history.dtype != torch.uint8 or history.dim() != 1):
        raise ValueError(f"{_HISTORY} is not text")
    best = {name.removeprefix(_BEST): filed.pop(name) for name in list(filed) if name.startswith(_BEST)}
    return TaskState(progress, filed, best, history.numpy().tobytes() if history is not None else b"")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The task that looks for its state: its facts, and name and shape of each tensor in its adapter's file."""

    fingerprint: Fingerprint
    shapes: Mapping[str, tuple[int, ...]]
    moments: int = 2  # that its optimizer keeps of each parameter

    @property
    def prefixes(self) -> tuple[str, ...]:
        return PREFIXES[: 1 + self.moments]
