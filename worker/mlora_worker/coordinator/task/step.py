"""The step of a task that is in the pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlora_worker.bounds import is_within
from mlora_worker.coordinator.task.fault_attribution import Charge
from mlora_worker.coordinator.task.preference import preference_of, sums_with
from mlora_worker.coordinator.task.prepared import PreparedTask
from mlora_worker.data.training_rows.pairs import likelihood_of
from mlora_worker.data.training_rows.row_weights import relative_weights, weighted_sum
from mlora_worker.pipeline.faults import Fault
from mlora_worker.protocol import Objective, PreferenceRecord


@dataclass(slots=True)
class StepInFlight:
    """The step of a task that is in the pipeline."""

    step: int
    rows: tuple[int, ...]  # indices into the prepared rows
    supervised: int
    tokens: int
    weighted: float  # supervised tokens, or of preferences rows, each as it weighs
    row_weights: tuple[float, ...] | None = None  # of its rows, the largest 1; None: all are 1
    likelihood: float = 0.0  # of pairs, see ``stream.items.Pairs``
    objective: Objective | None = None  # None: its rows are no preferences
    kl: float | None = None  # see ``stream.items.Unpaired``; None: the objective has none
    issued: float | None = None  # monotonic seconds: when its first microbatch was
    loss_sum: float = 0.0
    rewards: Sequence[float] = ()  # sums over its pairs or answers
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
        """Factor that makes a mean over the step's supervised tokens, or rows of preferences, of a sum."""
        return 1.0 / self.weighted if self.weighted else 0.0

    def weights_of(self, first: int, count: int) -> tuple[float, ...] | None:
        """Of ``count`` of its rows, from row ``first`` on."""
        return None if self.row_weights is None else self.row_weights[first : first + count]

    def add(self, loss_sum: float, squared_norm: float, rewards: Sequence[float]) -> None:
        """What a microbatch of it brought back."""
        self.loss_sum += loss_sum
        self.squared_norm += squared_norm
        if self.objective is not None:
            self.rewards = sums_with(self.rewards, rewards)

    @property
    def loss(self) -> float:
        return self.loss_sum * self.weight

    @property
    def preference(self) -> PreferenceRecord | None:
        if self.objective is None or not self.rewards:
            return None
        return preference_of(self.rewards, self.weighted, self.objective, self.kl)

    @property
    def norm(self) -> float:
        """Of the gradient."""
        return math.sqrt(self.squared_norm) if self.squared_norm >= 0 else math.nan

    @property
    def invalid(self) -> str | None:
        """What of it is not finite."""
        if not is_within(self.loss):
            return f"loss {self.loss}"
        return f"gradient norm {self.norm}" if not is_within(self.norm) else None

    @property
    def trains(self) -> bool:
        """Without a supervised token it adds nothing and does not move the adapter."""
        return self.supervised > 0

    def again(self) -> StepInFlight:
        """The same rows, of which nothing is back."""
        return StepInFlight(
            self.step,
            self.rows,
            self.supervised,
            self.tokens,
            self.weighted,
            self.row_weights,
            self.likelihood,
            self.objective,
            self.kl,
        )


def step_of(
    prepared: PreparedTask, step: int, preference: Objective | None = None, kl: float | None = None
) -> StepInFlight:
    """``preference``: the objective of a task that learns to prefer; ``kl``: as of a step."""
    rows = prepared.steps.rows_of_step(step)
    held = [prepared.rows[row] for row in rows]
    counts = [int(np.count_nonzero(row.labels >= 0)) for row in held]
    weights = relative_weights(held)
    weighted, likelihood = weighted_sum(counts, weights), 0.0
    if preference is not None:
        weighted, likelihood = likelihood_of(held, preference, weights)
    return StepInFlight(
        step=step,
        rows=rows,
        supervised=sum(counts),
        tokens=sum(len(row.ids) for row in held),
        weighted=weighted,
        row_weights=weights,
        likelihood=likelihood,
        objective=preference,
        kl=kl,
    )
