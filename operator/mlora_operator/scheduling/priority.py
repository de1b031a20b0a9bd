"""Policy ``priority``: the higher priority first, then the older task. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mlora_operator.scheduling.entrant import Entrant


class Priority:
    """1. The order is that of ``in_order``: priority, then age, then names.
    2. A task takes the place of one of lower priority, never of one of equal priority, however old it is.
    """

    def order(self, entrants: Sequence[Entrant]) -> Sequence[Entrant]:
        return sorted(entrants, key=lambda one: one.task.key)

    def displaces(self, waiting: Entrant, running: Entrant) -> bool:
        return waiting.task.priority > running.task.priority
