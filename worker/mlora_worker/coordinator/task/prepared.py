"""What is ready of a task before it trains: its rows, and what it goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mlora_worker.coordinator.task.evaluation import EvaluationRows
from mlora_worker.coordinator.task.history import History
from mlora_worker.data.prepare import TokenRow
from mlora_worker.data.training_rows.step_order import StepPlan
from mlora_worker.pipeline.frames import Payload
from mlora_worker.protocol import (
    DataCounts,
)
from mlora_worker.storage.artifacts.task_state import Fingerprint, SavedProgress
from mlora_worker.stream.planner import TaskLoad


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """Rows and what follows from them and the spec alone."""

    rows: Sequence[TokenRow]
    counts: DataCounts
    steps: StepPlan
    targets: tuple[str, ...]  # resolved names of linear modules
    load: TaskLoad  # what a usual step holds
    fingerprint: Fingerprint = field(default_factory=dict)  # a checkpoint of other facts is not its own
    evaluation: EvaluationRows | None = None
    initial: InitialState | None = None  # it goes on from another adapter
    reference_sha256: str | None = (
        None  # of that adapter, where it is the reference; None: the frozen base would be
    )


@dataclass(frozen=True, slots=True)
class InitialState:
    """Another adapter's weights, by PEFT's names."""

    own: Mapping[str, Tensor]  # stage 0's part
    payloads: Mapping[int, Payload]  # of each other stage, as safetensors


@dataclass(frozen=True, slots=True)
class Restoration:
    """What a Load brings along so that the task goes on from a checkpoint."""

    progress: SavedProgress
    own: Mapping[str, Tensor]  # stage 0's part
    payloads: Mapping[int, Payload]  # of each other stage, as safetensors
    best: Mapping[str, Tensor] = field(default_factory=dict)
    history: History = field(default_factory=History)
