"""What a policy decides: who goes first, and which task may preempt which. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from mlora_operator.scheduling.entrant import Entrant


class Policy(Protocol):
    """Everything else (memory, leaving, holding back) is the same for all policies: ``schedule``."""

    steady: ClassVar[bool]  # says the same as time passes and those inside do steps (``standstill``)

    def order(self, entrants: Sequence[Entrant]) -> Sequence[Entrant]:
        """All of them, the first to be served first. Total: it does not depend on how they were listed."""
        ...

    def displaces(self, waiting: Entrant, running: Entrant) -> bool:
        """Whether ``running`` may be told to leave for ``waiting``, which stands before it in the order.

        It must not be so that two tasks preempt each other again and again.
        """
        ...
