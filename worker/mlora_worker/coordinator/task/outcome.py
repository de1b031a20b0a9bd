"""What a task has come to: a checkpoint on its way to rank 0, and what is published."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mlora_worker.coordinator.task.evaluation import Best
from mlora_worker.protocol import (
    EvaluationRecord,
    StepRecord,
)
from mlora_worker.storage.artifacts.task_state import SavedProgress


@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint whose parts are on their way from the stages to rank 0."""

    number: int  # of the item
    progress: SavedProgress
    parts: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # stage -> its tensors
    best: Best | None = None
    history: bytes = b""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What a task has come to, but for its weights. ``step`` and ``evaluation`` are of the weights that are published."""

    step: int
    last: StepRecord | None
    updates: int
    evaluation: EvaluationRecord | None = None
    history: bytes = b""
