"""What a report says of pairs, from what came back of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mlora_worker.bounds import is_within
from mlora_worker.protocol import PreferenceRecord


def sums_with(before: Sequence[float], found: Sequence[float]) -> tuple[float, ...]:
    """``before``: of the microbatches that were back already; empty where this is the first."""
    return tuple(one + other for one, other in zip(before or [0.0] * len(found), found, strict=True))


def preference_of(sums: Sequence[float], weighted: float) -> PreferenceRecord | None:
    """``sums`` over pairs, which count ``weighted``, as ``model.objectives`` has them; None where one is no number."""
    chosen, rejected, accuracy, chosen_logps, rejected_logps = (one / weighted for one in sums)
    figures = {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": chosen - rejected,
        "accuracy": accuracy,
        "chosen_logps": chosen_logps,
        "rejected_logps": rejected_logps,
    }
    return PreferenceRecord(**figures) if all(map(is_within, figures.values())) else None
