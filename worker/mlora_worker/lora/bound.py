"""What tasks bring to a microbatch. All of it is known from a task's load on, but for its rows and their weight.

A microbatch of 64 tasks on a large model has thousands of group segments. Who needs them one by one gets them here, made
when they are first asked for; who fills tables for a device takes what is known already (``triton_tables``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

from torch import Tensor

from mlora_worker.lora.dropout import dropout_mask
from mlora_worker.lora.experts import ExpertsPart, SegmentAdditions
from mlora_worker.lora.groups import GroupSegment
from mlora_worker.lora.magnitudes import GroupMagnitudes, SegmentMagnitudes


@dataclass(frozen=True, slots=True)
class TaskPart:
    """A task's products on the modules of one input group that it gives the same rank and scale; as in ``GroupSegment``."""

    group: int
    rank: int
    members: tuple[int, ...]
    a: Tensor
    b: tuple[Tensor, ...]
    grad_a: Tensor
    grad_b: tuple[Tensor, ...]
    scale: float
    mask_name: str  # of its dropout masks


@dataclass(frozen=True, eq=False)
class TaskProducts:
    """In the order of the input groups."""

    parts: tuple[TaskPart, ...]
    dropout: float
    magnitudes: tuple[GroupMagnitudes, ...] = ()
    experts: Mapping[str, ExpertsPart] = field(default_factory=dict)  # by their path in the whole model


@dataclass(frozen=True, slots=True)
class Placed:
    """A task's rows in a microbatch."""

    task: TaskProducts
    rows: slice
    weight: float
    token_keys: Tensor | None  # None: no dropout

    def segment(self, part: TaskPart) -> GroupSegment:
        keys, inputs = self.token_keys, part.a.shape[1]
        return GroupSegment(
            rows=self.rows,
            rank=part.rank,
            members=part.members,
            a=part.a,
            b=part.b,
            grad_a=part.grad_a,
            grad_b=part.grad_b,
            scale=part.scale,
            weight=self.weight,
            # One mask for modules that share their input, under the name of the first of them.
            mask=None if keys is None else dropout_mask(keys, part.mask_name, inputs, self.task.dropout),
        )


class BoundGroups(Sequence[Sequence[GroupSegment]]):
    """Of each of ``groups`` input groups, the segments of ``placed`` on it; all are made when one is asked for."""

    def __init__(self, groups: int, placed: Sequence[Placed]) -> None:
        self._groups, self.placed = groups, tuple(placed)

    @overload
    def __getitem__(self, index: int) -> Sequence[GroupSegment]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[GroupSegment]]: ...
    def __getitem__(self, index: int | slice) -> Sequence[GroupSegment] | Sequence[Sequence[GroupSegment]]:
        return self._made[index]

    def __len__(self) -> int:
        return self._groups

    def magnitudes(self) -> Sequence[Sequence[SegmentMagnitudes]]:
        """Of each input group; empty where no task has any."""
        if not any(placed.task.magnitudes for placed in self.placed):
            return ()
        made: list[list[SegmentMagnitudes]] = [[] for _ in range(self._groups)]
        for placed in self.placed:
            for own in placed.task.magnitudes:
                made[own.group].append(SegmentMagnitudes(placed.rows, own, placed.weight))
        return made

    def experts(self) -> Mapping[str, Sequence[SegmentAdditions | None]]:
        """What each segment adds to the routed experts of a layer, by their path; those that none adds to are left out."""
        paths = dict.fromkeys(path for placed in self.placed for path in placed.task.experts)
        return {
            path: tuple(
                SegmentAdditions(part, placed.weight) if part is not None else None
                for placed in self.placed
                for part in (placed.task.experts.get(path),)
            )
            for path in paths
        }

    @cached_property
    def _made(self) -> list[list[GroupSegment]]:
        made: list[list[GroupSegment]] = [[] for _ in range(self._groups)]
        for placed in self.placed:
            for part in placed.task.parts:
                made[part.group].append(placed.segment(part))
        return made
