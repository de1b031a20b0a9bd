"""Forwards that find out how far adapters have come from their reference (``task/divergence.py``), before each step and
each evaluation of tasks whose objective asks for it. Their neighbours' microbatches go between."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mlora_worker.coordinator.dispatch.issuing import InStream, Issuer
from mlora_worker.coordinator.dispatch.on_the_way import OnTheWay
from mlora_worker.coordinator.task.divergence import DivergenceInFlight, MismatchedRows, Side, begun
from mlora_worker.coordinator.task.evaluation import cut_rows
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.pipeline.mailbox import Entry
from mlora_worker.protocol import FailureReason
from mlora_worker.stream.rule import IssueRule


@dataclass(frozen=True, slots=True)
class _Asked:
    task: TaskRun
    found: DivergenceInFlight
    side: Side


class DivergenceForwards:
    def __init__(self, stages: int, rule: IssueRule, inside: InStream, issuer: Issuer) -> None:
        self._rule, self._inside, self._issuer = rule, inside, issuer
        self._out = OnTheWay[_Asked](stages)

    def next(self) -> Entry | None:
        """None when nothing is wanted, or enough of them are on their way."""
        if self._out.full:
            return None
        for task in self._inside:
            if task.leaving or not self._rule.is_idle(task.uid):
                continue
            if task.flight.divergence is None and task.divergence_is_due:
                task.flight.divergence = self._begin(task)
            found = task.flight.divergence
            if found is not None and found.left:
                side, indices = found.left.pop()
                found.outstanding += 1
                rows = [found.rows[index] for index in indices]
                entry = self._issuer.refer(task, rows, side, task.flight.take_update())
                self._out.sent(entry.item.number, _Asked(task, found, side))
                return entry
        return None

    def returned(self, number: int, values: Tensor) -> bool:
        """With [rows] log-probabilities. False for what is none of these."""
        asked = self._out.back(number)
        if asked is None:
            return False
        task, found = asked.task, asked.found
        found.add(asked.side, values)
        if not found.complete or task.flight.divergence is not found:
            return True
        if found.kl is None and not task.finished:
            task.fail(
                FailureReason.NON_FINITE_LOSS,
                f"after step {task.progress.step} of {task.total_steps} the divergence from the reference is not a finite "
                f"number; no adapter was published. A lower learningRate, more warmupSteps or a maxGradNorm usually helps",
            )
        elif found.of_evaluation and task.prepared is not None and task.prepared.evaluation is not None:
            task.prepared.evaluation.base_logps = found.sums["base"]
        return True

    def lost(self, number: int) -> None:
        """It met a fault, so no values may come: they are asked for again."""
        asked = self._out.back(number)
        if asked is not None and asked.task.flight.divergence is asked.found:
            asked.task.flight.divergence = None

    def _begin(self, task: TaskRun) -> DivergenceInFlight:
        prepared = task.prepared
        assert prepared is not None
        budget = self._rule.budget_of([task.uid])
        if task.evaluation_is_due:
            evaluation = prepared.evaluation
            assert evaluation is not None
            assert evaluation.mismatched is not None
            cut = cut_rows(evaluation.mismatched.lengths, budget)
            return begun(evaluation.mismatched, cut, of_evaluation=True, base=evaluation.base_logps)
        own = [prepared.rows[row] for row in prepared.steps.rows_of_step(task.progress.step + 1)]
        rows = MismatchedRows(own, task.plan.training.max_seq_length)
        return begun(rows, cut_rows(rows.lengths, budget))
