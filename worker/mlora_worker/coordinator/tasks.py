"""What the coordinator knows of one task.

    PREPARING -> PREPARED -> TRAINING -> SAVING -> SUCCEEDED
         |           ^          |           |
         |           +-- no longer admitted |
         +--------- any of them -----------+--> FAILED

All fields are read and written with the coordinator's lock held.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from mlora_worker.coordinator.trials import Charge
from mlora_worker.data.order import StepPlan
from mlora_worker.data.prepare import TokenRow
from mlora_worker.data.schedule import learning_rate
from mlora_worker.pipeline.faults import Fault
from mlora_worker.protocol import (
    AdapterInfo,
    DataCounts,
    Failure,
    FailureReason,
    StepRecord,
    TaskPhase,
    TaskPlan,
    TaskReport,
)
from mlora_worker.stream.items import Update
from mlora_worker.stream.planner import TaskLoad


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """Rows and what follows from them and the spec alone."""

    rows: list[TokenRow]
    counts: DataCounts
    steps: StepPlan
    targets: tuple[str, ...]  # resolved names of linear modules
    load: TaskLoad  # what a usual step holds


@dataclass(slots=True)
class StepInFlight:
    """The step of a task that is in the pipeline."""

    step: int
    rows: tuple[int, ...]  # indices into the prepared rows
    supervised: int
    tokens: int
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
        return 1.0 / self.supervised if self.supervised else 0.0


@dataclass(slots=True)
class TaskRun:
    plan: TaskPlan
    phase: TaskPhase = TaskPhase.PREPARING
    prepared: PreparedTask | None = None
    in_stream: bool = False  # its Load was issued, its Unload was not
    withdrawn: bool = False  # the plan lists it no longer
    steps_done: int = 0
    in_flight: StepInFlight | None = None
    update: Update | None = None  # closes the last returned step; rides with the next item
    discard: bool = False  # its step is issued again; the word rides with the next segment
    load_number: int = 0  # of the item that brought it into the stream
    last: StepRecord | None = None
    tokens_done: int = 0
    started: float | None = None  # monotonic seconds
    seconds: float = 0.0  # from the start of training to the last returned step
    parts: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # stage -> its tensors of the adapter
    adapter: AdapterInfo | None = None
    failure: Failure | None = None

    @property
    def uid(self) -> str:
        return self.plan.uid

    @property
    def name(self) -> str:
        return f"{self.plan.namespace}/{self.plan.name}"

    @property
    def total_steps(self) -> int:
        return self.prepared.steps.total_steps if self.prepared else 0

    @property
    def finished(self) -> bool:
        return self.phase in (TaskPhase.SUCCEEDED, TaskPhase.FAILED)

    @property
    def may_step(self) -> bool:
        """It may enter the pipeline with its next step."""
        return self.phase is TaskPhase.TRAINING and not self.leaving and self.steps_done < self.total_steps

    @property
    def leaving(self) -> bool:
        """It shall be unloaded as soon as nothing of it is in flight."""
        return self.in_stream and (
            self.withdrawn or not self.plan.admitted or self.phase is not TaskPhase.TRAINING
        )

    def begin_step(self) -> StepInFlight:
        """The next step's rows; asked again before it returned, the same step."""
        if self.in_flight is None:
            assert self.prepared is not None
            step = self.steps_done + 1
            rows = self.prepared.steps.rows_of_step(step)
            self.in_flight = StepInFlight(
                step=step,
                rows=rows,
                supervised=sum(int(np.count_nonzero(self.prepared.rows[row].labels >= 0)) for row in rows),
                tokens=sum(len(self.prepared.rows[row].ids) for row in rows),
            )
        return self.in_flight

    def finish_step(self, now: float) -> None:
        """The whole step is back: record it and decide the update. A loss or norm that is not finite fails the task."""
        flight = self.in_flight
        assert flight is not None
        self.in_flight = None
        if self.phase is not TaskPhase.TRAINING:
            return
        loss = flight.loss_sum * flight.weight
        norm = math.sqrt(flight.squared_norm) if flight.squared_norm >= 0 else math.nan
        if not (math.isfinite(loss) and math.isfinite(norm)):
            what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
            self.fail(
                FailureReason.NON_FINITE_LOSS,
                f"step {flight.step} of {self.total_steps} gave {what}; no adapter was published. "
                "A lower learningRate, more warmupSteps or a maxGradNorm usually helps",
            )
            return
        training = self.plan.training
        rate = learning_rate(flight.step, self.total_steps, training)
        trains = (
            flight.supervised > 0
        )  # a step without a supervised token adds nothing and does not move the adapter
        if trains:
            clip = min(1.0, training.max_grad_norm / (norm + 1e-6)) if training.max_grad_norm > 0 else 1.0
            self.update = Update(step=flight.step, learning_rate=rate, clip=clip)
        self.steps_done = flight.step
        self.tokens_done += flight.tokens
        self.seconds = now - (self.started if self.started is not None else now)
        self.last = StepRecord(
            step=flight.step,
            loss=loss if trains else None,
            learning_rate=rate,
            grad_norm=norm if trains else None,
            tokens=flight.tokens,
        )

    def repeat_step(self) -> None:
        """The step came back void: the same rows again. The update before it was applied, so this alone is discarded."""
        flight = self.in_flight
        assert flight is not None
        self.in_flight = StepInFlight(flight.step, flight.rows, flight.supervised, flight.tokens)
        self.discard = True

    def restart(self) -> None:
        """Back to PREPARED: it left the stream before its end and will train from its start."""
        self.phase = TaskPhase.PREPARED
        self.steps_done = self.tokens_done = 0
        self.seconds = 0.0
        self.discard = False
        self.in_flight = self.update = self.last = self.started = None
        self.parts = {}

    def fail(self, reason: FailureReason, message: str) -> None:
        self.phase = TaskPhase.FAILED
        self.failure = Failure(reason=reason, message=message[:2048])
        self.parts = {}

    def report(self) -> TaskReport:
        return TaskReport(
            uid=self.uid,
            phase=self.phase,
            step=self.steps_done,
            total_steps=self.total_steps,
            loss=self.last.loss if self.last else None,
            tokens_per_second=self.tokens_done / self.seconds if self.seconds > 0 else None,
            data=self.prepared.counts if self.prepared else None,
            adapter=self.adapter,
            failure=self.failure,
        )
