"""The step of a task that is in the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from mlora_worker.coordinator.task.fault_attribution import Charge
from mlora_worker.pipeline.faults import Fault


@dataclass(slots=True)
class StepInFlight:
    """The step of a task that is in the pipeline."""

    step: int
    rows: tuple[int, ...]  # indices into the prepared rows
    supervised: int
    tokens: int
    weighted: float  # supervised tokens, each as its row weighs
    row_weights: tuple[float, ...] | None = None  # of its rows, the largest 1; None: all are 1
    issued: float | None = None  # monotonic seconds: when its first microbatch was
    loss_sum: float = 0.0
    squared_norm: float = 0.0
    void: bool = False  # a microbatch of it came back with a fault
    own_fault: Fault | None = None  # of this very task: its adapter is broken on a stage
    charge: Charge | None = None  # a fault of a whole microbatch

    def accept(self, charge: Charge) -> None:
        """A fault of one of its microbatches; that of the widest counts."""
        if self.charge is None or charge.tokens > self.charge.tokens:
            self.charge = charge

    @property
    def weight(self) -> float:
        """Factor that makes a mean over the step's supervised tokens of a sum."""
        return 1.0 / self.weighted if self.weighted else 0.0

    def weights_of(self, first: int, count: int) -> tuple[float, ...] | None:
        """Of ``count`` of its rows, from row ``first`` on."""
        return None if self.row_weights is None else self.row_weights[first : first + count]
