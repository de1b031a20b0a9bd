"""What the segments of a microbatch bring to a stage: products on its linear modules, and weights of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mlora_worker.lora.dropout import dropout_mask, token_keys
from mlora_worker.lora.groups import GroupSegment
from mlora_worker.lora.linear import InputGroup
from mlora_worker.pipeline.loaded import LoadedTask
from mlora_worker.stream.items import Segment


def segments_by_group(
    groups: Sequence[InputGroup],
    segments: Iterable[Segment],
    tasks: Iterable[LoadedTask],
    *,
    evaluating: bool = False,
) -> list[list[GroupSegment]]:
    """Of each input group, the products of ``segments`` on it. ``evaluating``: without dropout."""
    found: list[list[GroupSegment]] = [[] for _ in groups]
    start = 0
    for segment, task in zip(segments, tasks, strict=True):
        rows = slice(start, start := start + segment.tokens)
        keys = None
        if task.lora.dropout > 0 and not evaluating:
            # On the host: kernels take them from there with their own tables.
            keys = token_keys(task.seed, segment.step, segment.first_row, segment.lengths)
        adapter = task.adapter
        for own, stack, gradient in zip(task.targets, adapter.compute, adapter.gradients, strict=True):
            mask = None
            if keys is not None:
                # One mask for modules that share their input, under the name of the first of them.
                mask = dropout_mask(keys, groups[own.group].name, stack.a.shape[1], task.lora.dropout)
            found[own.group].append(
                GroupSegment(
                    rows=rows,
                    rank=own.rank,
                    members=own.positions,
                    a=stack.a,
                    b=stack.b,
                    grad_a=gradient.a,
                    grad_b=gradient.b,
                    scale=own.scale,
                    weight=segment.weight,
                    mask=mask,
                )
            )
    return found


def position_weights(segments: Sequence[Segment]) -> Tensor | None:
    """[tokens] float64 in the host's memory: of each position, the weight of its row; None when all weigh the same."""
    if all(segment.row_weights is None for segment in segments):
        return None
    weights = [
        weight for segment in segments for weight in segment.row_weights or (1.0,) * len(segment.lengths)
    ]
    lengths = [length for segment in segments for length in segment.lengths]
    return torch.repeat_interleave(torch.tensor(weights, dtype=torch.float64), torch.tensor(lengths))
