"""What a report says of preferences, from what came back of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mlora_worker.bounds import is_within
from mlora_worker.protocol import Objective, PreferenceRecord

_NOTHING = 1e-9  # of all weights: what rounding leaves


def sums_with(before: Sequence[float], found: Sequence[float]) -> tuple[float, ...]:
    """``before``: of the microbatches that were back already; empty where this is the first."""
    return tuple(one + other for one, other in zip(before or [0.0] * len(found), found, strict=True))


def preference_of(
    sums: Sequence[float], weighted: float, objective: Objective, kl: float | None = None
) -> PreferenceRecord | None:
    """``sums`` over pairs or answers, which count ``weighted``, as ``model.objectives`` has them; None where one is no
    number. ``kl``: the estimate of the divergence that the losses were taken with."""
    figures = _of_pairs(sums, weighted) if objective.paired else _of_answers(sums, weighted)
    if kl is not None:
        figures["kl"] = kl
    return PreferenceRecord(**figures) if all(map(is_within, figures.values())) else None


def _of_pairs(sums: Sequence[float], weighted: float) -> dict[str, float]:
    chosen, rejected, accuracy, chosen_logps, rejected_logps = (one / weighted for one in sums)
    return {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": chosen - rejected,
        "accuracy": accuracy,
        "chosen_logps": chosen_logps,
        "rejected_logps": rejected_logps,
    }


def _of_answers(sums: Sequence[float], weighted: float) -> dict[str, float]:
    """Of labels of which there is an answer. What weighs nothing is none."""
    chosen, rejected, desirable, chosen_logps, rejected_logps = sums
    undesirable = weighted - desirable
    figures: dict[str, float] = {}
    if desirable > _NOTHING * weighted:
        figures |= {"chosen_reward": chosen / desirable, "chosen_logps": chosen_logps / desirable}
    if undesirable > _NOTHING * weighted:
        figures |= {"rejected_reward": rejected / undesirable, "rejected_logps": rejected_logps / undesirable}
    if len(figures) == 4:
        figures["margin"] = figures["chosen_reward"] - figures["rejected_reward"]
    return figures
