"""Evaluation while a task trains: when one is due, what travels for it, and what follows from its result.

Evaluation rows go through the stream as microbatches of their own, forward only, without dropout, with the weights after
the step that came last. The task itself waits for the result, since that may end it; its neighbours do not: their
microbatches go between. What follows depends on the task's own losses alone, and all of it is in its checkpoints
(``EvaluationProgress``), so a task that was preempted stops at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from mlora_worker.bounds import is_within
from mlora_worker.coordinator.task.divergence import MismatchedRows
from mlora_worker.coordinator.task.preference import preference_of, sums_with
from mlora_worker.data.training_rows.pairs import answer_tokens, likelihood_of
from mlora_worker.data.training_rows.row_weights import relative, weighted_sum
from mlora_worker.data.training_rows.token_rows import TokenRow, TokenRows, digest_of
from mlora_worker.protocol import Evaluation, EvaluationRecord, Objective
from mlora_worker.storage.artifacts.task_state import EvaluationProgress, Fact


@dataclass(slots=True)
class EvaluationRows:
    """What to evaluate on, and how. All that is the same in each evaluation is found out when it is made, which is off the
    critical path: ``begin`` is called with the lock held, while the whole pipeline waits.
    """

    spec: Evaluation
    rows: Sequence[TokenRow]
    preference: Objective | None = None  # of a task that learns to prefer
    longest: int = 0  # training.maxSeqLength
    mismatched: MismatchedRows | None = field(init=False, default=None)  # where the objective needs them
    base_logps: float | None = field(init=False, default=None)  # of their answers, together, once it is known
    _sizes: _Sizes = field(init=False)
    _cut: tuple[int, tuple[tuple[int, ...], ...]] | None = field(init=False, default=None)  # for which budget

    def __post_init__(self) -> None:
        self._sizes = _sizes_of(self.rows, self.preference)
        if self.preference is not None and self.preference.has_divergence:
            self.mismatched = MismatchedRows(self.rows, self.longest)

    def microbatches(self, budget: int) -> tuple[tuple[int, ...], ...]:
        """Indices of the rows of each. ``budget``: most tokens of a microbatch; a longer row travels alone."""
        if self._cut is None or self._cut[0] != budget:
            self._cut = budget, cut_rows(self._sizes.lengths, budget)
        return self._cut[1]

    def begin(self, step: int, budget: int, kl: float | None = None) -> EvaluationInFlight:
        """An evaluation after ``step``. ``budget``: as above; ``kl``: as of a step."""
        sizes = self._sizes
        return EvaluationInFlight(
            step,
            list(reversed(self.microbatches(budget))),
            sizes.supervised,
            sizes.weighted,
            sizes.row_weights,
            sizes.likelihood,
            sizes.answers,
            self.preference,
            kl,
        )

    def is_due(self, step: int, total_steps: int, last: EvaluationRecord | None) -> bool:
        """After each ``everySteps`` steps, and after the last one; once."""
        if step < 1 or (last is not None and last.step >= step):
            return False
        return step % self.spec.every_steps == 0 or step >= total_steps

    def facts(self) -> dict[str, Fact]:
        """What of it decides a task's result, for a checkpoint's fingerprint."""
        found: dict[str, Fact] = {
            "evaluation.sha256": digest_of(self.rows),
            "evaluation.everySteps": self.spec.every_steps,
            "evaluation.keepBest": self.spec.keep_best,
        }
        stopping = self.spec.early_stopping
        if stopping is not None:
            found["evaluation.patience"] = stopping.patience
            found["evaluation.minDelta"] = float(stopping.min_delta)
        return found


@dataclass(slots=True)
class EvaluationInFlight:
    """One evaluation on its way."""

    step: int
    left: list[tuple[int, ...]]  # microbatches that have not entered yet, the next one last; indices of rows
    supervised: int
    weighted: float  # supervised tokens, or of preferences rows, each as it weighs
    row_weights: tuple[float, ...] | None = None  # of all rows, the largest 1; None: all are 1
    likelihood: float = 0.0  # of pairs, see ``stream.items.Pairs``
    answers: float = 0.0  # tokens of the chosen or desirable answers, each as it weighs
    objective: Objective | None = None  # None: its rows are no preferences
    kl: float | None = None  # as of a step
    outstanding: int = 0
    loss_sum: float = 0.0
    correct: float = 0.0
    rewards: Sequence[float] = ()  # sums over pairs or answers

    @property
    def complete(self) -> bool:
        return not self.left and not self.outstanding

    def add(self, found: Tensor) -> None:
        """Of a microbatch that is back: sum of losses, correct predictions; of preferences their rewards, too."""
        self.outstanding -= 1
        loss_sum, correct, *rewards = found.tolist()
        self.loss_sum += loss_sum
        self.correct += correct
        self.rewards = sums_with(self.rewards, rewards)

    def record(self) -> EvaluationRecord | None:
        """None when the loss is no number."""
        loss = self.loss_sum / self.weighted
        if not is_within(loss):
            return None
        preference, tokens = None, self.weighted
        if self.objective is not None:
            tokens = self.answers
            preference = preference_of(self.rewards, self.weighted, self.objective, self.kl)
        return EvaluationRecord(
            step=self.step,
            loss=loss,
            token_accuracy=self.correct / tokens,
            tokens=self.supervised,
            preference=preference,
        )


@dataclass(frozen=True, slots=True)
class _Sizes:
    lengths: list[int]  # tokens of each row
    supervised: int  # labels of all rows
    weighted: float
    row_weights: tuple[float, ...] | None
    likelihood: float = 0.0
    answers: float = 0.0


def _sizes_of(rows: Sequence[TokenRow], preference: Objective | None) -> _Sizes:
    if isinstance(rows, TokenRows):  # they are known without a look at any row
        lengths, counts, weights = rows.lengths.tolist(), rows.supervised.tolist(), rows.weights.tolist()
    else:
        lengths = [len(row.ids) for row in rows]
        counts = [int(np.count_nonzero(row.labels >= 0)) for row in rows]
        weights = [row.weight for row in rows]
    compared = relative(weights)
    if preference is None:
        return _Sizes(lengths, sum(counts), weighted_sum(counts, compared), compared)
    pairs, likelihood = likelihood_of(rows, preference, compared)
    answers = weighted_sum([answer_tokens(row) for row in rows], compared)
    return _Sizes(lengths, sum(counts), pairs, compared, likelihood, answers)


def cut_rows(lengths: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Indices of the rows of each microbatch. ``budget``: most tokens of one; a longer row travels alone."""
    cut: list[list[int]] = []
    tokens = 0
    for index, length in enumerate(lengths):
        if not cut or tokens + length > budget:
            cut.append([])
            tokens = 0
        cut[-1].append(index)
        tokens += length
    return tuple(map(tuple, cut))


@dataclass(slots=True)
class Best:
    """The adapter after the step that evaluated best: its parts come from the stages, or all at once from a checkpoint."""

    number: int  # of the item that asked for them
    record: EvaluationRecord
    parts: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for stage in sorted(self.parts) for name, tensor in self.parts[stage].items()}


def after(progress: EvaluationProgress, record: EvaluationRecord, spec: Evaluation) -> EvaluationProgress:
    """Where the task stands with a further result.

    1. The best is the lowest loss; of equal ones the first.
    2. The reference of early stopping moves when a loss is lower by more than ``minDelta``.
    3. It stops after ``patience`` evaluations in a row that did not move it.
    """
    best = progress.best if progress.best is not None and progress.best.loss <= record.loss else record
    stopping = spec.early_stopping
    delta = stopping.min_delta if stopping is not None else 0.0
    moved = progress.reference is None or record.loss < progress.reference - delta
    since = 0 if moved else progress.since + 1
    return EvaluationProgress(
        last=record,
        best=best,
        reference=record.loss if moved else progress.reference,
        since=since,
        stopped=stopping is not None and since >= stopping.patience,
    )
