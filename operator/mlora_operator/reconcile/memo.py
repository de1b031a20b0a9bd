"""What decisions have worked out: the next one works out again only what has changed. Pure but for being changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.accept import Acceptance
from mlora_operator.reconcile.answers import Answers
from mlora_operator.reconcile.claims import Claims
from mlora_operator.reconcile.decision import Event
from mlora_operator.reconcile.judging import Judging
from mlora_operator.reconcile.places import Known
from mlora_operator.reconcile.plans import Counted


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
