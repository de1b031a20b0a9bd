"""What is remembered of who is served, from decision to decision. Pure but for being changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlora_operator.reconcile.assignment.output_claims import OutputClaims
from mlora_operator.reconcile.memoize import Memoized
from mlora_operator.reconcile.state.acceptance import Acceptance


@dataclass
class AssignmentCache:
    acceptances: Memoized[Acceptance] = field(default_factory=Memoized)
    surroundings: Any = field(default=None, repr=False)  # see ``assign``; it holds Secrets
    claims: OutputClaims = field(default_factory=OutputClaims)

    def turn(self) -> None:
        """A decision begins."""
        self.acceptances.turn()
