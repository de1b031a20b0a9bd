"""Priorities in steps, so that a label has few values whatever numbers users write. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def labels_of(steps: Sequence[int]) -> tuple[str, ...]:
    """All labels that ``step_of`` gives."""
    return (f"<{steps[0]}", *map(str, steps))


def step_of(priority: int, steps: Sequence[int]) -> str:
    """The largest of ``steps`` (ascending) that is not above ``priority``, as a label; ``<N`` below the first, N.

    With steps 0, 10, 100: 37 is ``10``, 100 is ``100``, -5 is ``<0``.
    """
    at = bisect_right(steps, priority)
    return str(steps[at - 1]) if at else f"<{steps[0]}"
