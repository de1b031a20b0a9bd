"""Microbatches of evaluations: which comes next, and which have not come back yet."""

from __future__ import annotations

from torch import Tensor

from mlora_worker.coordinator.dispatch.issuing import InStream, Issuer
from mlora_worker.coordinator.dispatch.on_the_way import OnTheWay
from mlora_worker.coordinator.task.evaluation import EvaluationInFlight
from mlora_worker.pipeline.mailbox import Entry
from mlora_worker.stream.rule import IssueRule


class Evaluations:
    def __init__(self, stages: int, rule: IssueRule, inside: InStream, issuer: Issuer) -> None:
        self._rule, self._inside, self._issuer = rule, inside, issuer
        self._out = OnTheWay[EvaluationInFlight](stages)

    def next(self) -> Entry | None:
        """None when there is none, or enough of them are on their way."""
        if self._out.full:
            return None
        for task in self._inside:
            if task.leaving or not self._rule.is_idle(task.uid):
                continue
            if task.may_evaluate:
                assert task.prepared is not None
                assert task.prepared.evaluation is not None
                budget = self._rule.budget_of([task.uid])
                kl = task.flight.take_kl()
                task.flight.assessment = task.prepared.evaluation.begin(task.progress.step, budget, kl)
            if task.flight.assessment is not None and task.flight.assessment.left:
                item, entry = self._issuer.evaluate(task, task.flight.assessment)
                self._out.sent(item.number, task.flight.assessment)
                return entry
        return None

    def returned(self, number: int, scores: Tensor) -> bool:
        """With scores, see ``EvaluationInFlight.add``. False for one that nothing is known of any more."""
        found = self._out.back(number)
        if found is not None:
            found.add(scores)
        for task in self._inside:
            if task.flight.assessment is not None and task.flight.assessment is found and found.complete:
                task.finish_evaluation()
        return found is not None

    def lost(self, number: int) -> None:
        """It met a fault, so no scores may come: its evaluation begins again."""
        found = self._out.back(number)
        for task in self._inside:
            if found is not None and task.flight.assessment is found:
                task.flight.assessment = None
