"""Which consecutive decoder layers each stage holds. Pure.

A pipeline is as fast as its slowest stage, so the largest stage is made as small as it can be. The embedding
counts to stage 0, the head with its loss to the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from mlora_worker.model.errors import TooManyStages


def split_layers(
    cost: Sequence[float], stages: int, embed_cost: float = 0.0, head_cost: float = 0.0
) -> tuple[range, ...]:
    """``stages`` consecutive, non-empty ranges over the layers, in order.

    1. The largest stage costs as little as possible.
    2. Among such splits, the sum of the squared stage costs is the least: the others are even, too.
    3. Among such, earlier stages are shorter. So the answer is the same on every rank.

    Raises TooManyStages when a stage would be empty.
    """
    layers = len(cost)
    if stages < 1:
        raise ValueError(f"stages must be at least 1, not {stages}")
    if stages > layers:
        raise TooManyStages(
            f"{stages} stages were asked for, but the model has {layers} decoder layers and a stage "
            f"needs at least one: set stages to {layers} or less"
        )
    upto = [0.0]
    for layer_cost in cost:
        upto.append(upto[-1] + layer_cost)

    def stage_cost(stage: int, start: int, stop: int) -> float:
        ends = (embed_cost if stage == 0 else 0.0) + (head_cost if stage == stages - 1 else 0.0)
        return upto[stop] - upto[start] + ends

    # (largest, sum of squares, ends) of stages[stage:] over layers[start:]; tuples compare by the rules
    # above.
    @cache
    def best(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        if stage == stages - 1:
            own = stage_cost(stage, start, layers)
            return own, own * own, (layers,)
        options = []
        for stop in range(start + 1, layers - (stages - stage - 1) + 1):
            own = stage_cost(stage, start, stop)
            largest, squares, ends = best(stage + 1, stop)
            options.append((max(own, largest), own * own + squares, (stop, *ends)))
        return min(options)

    ends = best(0, 0)[2]
    return tuple(range(start, stop) for start, stop in zip((0, *ends[:-1]), ends, strict=True))
