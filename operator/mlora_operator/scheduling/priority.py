"""Policy ``priority``: the higher priority first, then the older task. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mlora_operator.scheduling.entrant import Entrant
from mlora_operator.scheduling.first_come import first_come


class Priority:
    """1. The order is that of ``first_come``: priority, then age; of the same second, by how long they are.
    2. A task preempts one of lower priority, never of one of equal priority, however old it is.
    """

    steady: ClassVar[bool] = True

    def order(self, entrants: Sequence[Entrant]) -> Sequence[Entrant]:
        return first_come(entrants)

    def displaces(self, waiting: Entrant, running: Entrant) -> bool:
        return waiting.task.priority > running.task.priority
