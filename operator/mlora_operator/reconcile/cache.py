"""What decisions have worked out: the next one works out again only what has changed. Pure but for being changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.admission.admit import AdmissionMemo
from mlora_operator.reconcile.admission.spec_checks import SpecChecks
from mlora_operator.reconcile.assignment.cache import AssignmentCache
from mlora_operator.reconcile.memoize import Memoized
from mlora_operator.reconcile.plan import Counted
from mlora_operator.reconcile.state.decision import Event


@dataclass
class Memo:
    """Of one reconcile loop, from decision to decision."""

    assignment: AssignmentCache = field(default_factory=AssignmentCache)
    statuses: Memoized[tuple[TaskStatus, tuple[Event, ...]]] = field(default_factory=Memoized)
    spec_checks: SpecChecks = field(default_factory=SpecChecks)
    admissions: AdmissionMemo = field(default_factory=AdmissionMemo, repr=False)
    plans: Memoized[Counted] = field(default_factory=Memoized, repr=False)  # it holds keys

    def turn(self) -> None:
        """A decision begins."""
        for answers in (self.assignment, self.statuses, self.admissions, self.plans, self.spec_checks):
            answers.turn()
