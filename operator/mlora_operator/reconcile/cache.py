"""What decisions have worked out: the next one works out again only what has changed. Pure but for being changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.admission.admit import Known
from mlora_operator.reconcile.admission.spec_checks import Judging
from mlora_operator.reconcile.assignment.cache import AssignmentCache
from mlora_operator.reconcile.memoize import Answers
from mlora_operator.reconcile.plan import Counted
from mlora_operator.reconcile.state.decision import Event


@dataclass
class Memo:
    """Of one reconcile loop, from decision to decision."""

    assignment: AssignmentCache = field(default_factory=AssignmentCache)
    statuses: Answers[tuple[TaskStatus, tuple[Event, ...]]] = field(default_factory=Answers)
    judging: Judging = field(default_factory=Judging)
    places: Known = field(default_factory=Known, repr=False)
    plans: Answers[Counted] = field(default_factory=Answers, repr=False)  # it holds keys

    def turn(self) -> None:
        """A decision begins."""
        for answers in (self.assignment, self.statuses, self.places, self.plans, self.judging):
            answers.turn()
