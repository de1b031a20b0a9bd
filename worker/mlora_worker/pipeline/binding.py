"""What the segments of a microbatch bring to a stage: products on its linear modules, and weights of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mlora_worker.lora.bound import BoundGroups, Placed
from mlora_worker.lora.dropout import token_keys
from mlora_worker.lora.linear import InputGroup
from mlora_worker.pipeline.loaded import LoadedTask
from mlora_worker.stream.items import Segment


def bound_groups(
    groups: Sequence[InputGroup],
    segments: Iterable[Segment],
    tasks: Iterable[LoadedTask],
    *,
    evaluating: bool = False,
) -> BoundGroups:
    """Of each input group, the products of ``segments`` on it. ``evaluating``: without dropout."""
    placed, start = [], 0
    for segment, task in zip(segments, tasks, strict=True):
        rows = slice(start, start := start + segment.tokens)
        keys = None
        if task.lora.dropout > 0 and not evaluating:
            # On the host: kernels take them from there with their own tables.
            keys = token_keys(task.seed, segment.step, segment.first_row, segment.lengths)
        placed.append(Placed(task.products, rows, segment.weight, keys))
    return BoundGroups(len(groups), placed)


def position_weights(segments: Sequence[Segment]) -> Tensor | None:
    """[tokens] float64 in the host's memory: of each position, the weight of its row; None when all weigh the same. Of
    preferences, it is their losses that weigh (``objective_losses``)."""
    if all(segment.row_weights is None or segment.prefers for segment in segments):
        return None
    weights = [weight for segment in segments for weight in _weights_of(segment)]
    lengths = [length for segment in segments for length in segment.lengths]
    return torch.repeat_interleave(torch.tensor(weights, dtype=torch.float64), torch.tensor(lengths))


def _weights_of(segment: Segment) -> Sequence[float]:
    if segment.row_weights is None or segment.prefers:
        return (1.0,) * len(segment.lengths)
    return segment.row_weights
