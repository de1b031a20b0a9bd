"""What is remembered of who is served, from decision to decision. Pure but for being changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlora_operator.reconcile.assignment.output_claims import Claims
from mlora_operator.reconcile.memoize import Answers
from mlora_operator.reconcile.state.acceptance import Acceptance


@dataclass
class AssignmentCache:
    acceptances: Answers[Acceptance] = field(default_factory=Answers)
    surroundings: Any = field(default=None, repr=False)  # see ``assign``; it holds Secrets
    claims: Claims = field(default_factory=Claims)

    def turn(self) -> None:
        """A decision begins."""
        self.acceptances.turn()
