"""What decisions have worked out: the next one works out again only what has changed. Pure but for being changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.admission.admit import Known
from mlora_operator.reconcile.admission.spec_checks import Judging
from mlora_operator.reconcile.assignment.eligibility import Acceptance
from mlora_operator.reconcile.assignment.output_claims import Claims
from mlora_operator.reconcile.memoize import Answers
from mlora_operator.reconcile.plan import Counted
from mlora_operator.reconcile.state.decision import Event


@dataclass
class Memo:
    """Of one reconcile loop, from decision to decision."""

    acceptances: Answers[Acceptance] = field(default_factory=Answers)
    statuses: Answers[tuple[TaskStatus, tuple[Event, ...]]] = field(default_factory=Answers)
    surroundings: Any = field(default=None, repr=False)  # see ``acceptances``; it holds Secrets

    judging: Judging = field(default_factory=Judging)
    claims: Claims = field(default_factory=Claims)
    places: Known = field(default_factory=Known, repr=False)
    plans: Answers[Counted] = field(default_factory=Answers, repr=False)  # it holds keys

    def turn(self) -> None:
        """A decision begins."""
        for answers in (self.acceptances, self.statuses, self.places, self.plans, self.judging):
            answers.turn()
