"""Rows of the kernels' tables as far as they are known from a task's load on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mlora_worker.lora.bound import TaskPart, TaskProducts
from mlora_worker.lora.dropout import DropoutMask, dropout_mask
from mlora_worker.lora.groups import GroupSegment

Integers = npt.NDArray[np.int64]

RANK_TILE = 16  # the least that the matrix units multiply
VECTORS = (8, 4, 1)  # elements; in half precision 16 bytes, 8, and what is always possible
MEMBERS = 4  # most linear modules that share their input; q, k and v are three

# Columns of a group's table, int64. Those from SLOT on have one entry per member. They are an even number, as are the
# entries of maps: whatever precedes a part, it starts at 16 bytes, so no kernel is compiled anew for another alignment.
FIRST_ROW, END_ROW, RANK, SLABS = 0, 1, 2, 3
LOW, A, GRAD_A = 4, 5, 6  # offset into the low-rank activations; addresses
THRESHOLD, MODULE_KEY = 7, 8
FACTOR, STRENGTH = 9, 10  # bits of float32: the segment's factor, and factor times weight
PARTIAL, PARTIAL_STEP, CHUNKS = 11, 12, 13  # offset of the first chunk's sums, how far to the next, how many
SLOT = 14  # which slab is the member's; -1: not adapted
B = SLOT + MEMBERS
GRAD_B = B + MEMBERS
PARTIAL_B = GRAD_B + MEMBERS  # offset of the member's sums within a chunk's
COLUMNS = PARTIAL_B + MEMBERS

KEEP_ALL = 2**30  # a mask's threshold where nothing is dropped


@dataclass(frozen=True, eq=False)
class StaticRows:
    """An entry per row, each of a task's products on one input group."""

    table: Integers  # [rows, COLUMNS]; zero where a microbatch decides
    group: Integers
    round: Integers  # how many rows of the same task on the same group precede it
    width: Integers  # columns of all slabs
    factor: npt.NDArray[np.float64]
    addresses: Integers  # their bits, one over the other: what they are multiples of
    drops: Integers  # 1: with dropout
    operands: Sequence[tuple[Tensor, ...]]  # A and B

    def taken(self, order: Integers) -> StaticRows:
        """Those rows in that order, but for the operands."""
        return StaticRows(
            self.table[order], self.group[order], self.round[order], self.width[order], self.factor[order],
            self.addresses[order], self.drops[order], self.operands,
        )  # fmt: skip


def rows_of_task(task: TaskProducts, keys: Tensor | None) -> StaticRows:
    """``keys``: of any tokens; None: nothing is dropped out. Raises ValueError for a group of more modules than the kernels
    know."""
    masks = [
        None if keys is None else dropout_mask(keys, part.mask_name, part.a.shape[1], task.dropout)
        for part in task.parts
    ]
    return _rows(task.parts, masks, [part.group for part in task.parts])


def rows_of_segments(segments: Sequence[GroupSegment]) -> StaticRows:
    """Groups and rounds are the caller's to know."""
    return _rows(segments, [segment.mask for segment in segments], range(len(segments)))


def joined(many: Sequence[StaticRows]) -> StaticRows:
    def all_of(own: Callable[[StaticRows], npt.NDArray[Any]]) -> Any:
        return np.concatenate([own(one) for one in many])

    return StaticRows(
        all_of(lambda one: one.table), all_of(lambda one: one.group), all_of(lambda one: one.round),
        all_of(lambda one: one.width), all_of(lambda one: one.factor), all_of(lambda one: one.addresses),
        all_of(lambda one: one.drops), Chained([one.operands for one in many]),
    )  # fmt: skip


class Chained(Sequence[tuple[Tensor, ...]]):
    """Several lists as one, not copied: of thousands of entries few are looked at."""

    def __init__(self, parts: Sequence[Sequence[tuple[Tensor, ...]]]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[Tensor, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[Tensor, ...] | Sequence[tuple[Tensor, ...]]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][index - int(self._ends[part])]

    def __len__(self) -> int:
        return int(self._ends[-1])


def padded(rank: Integers) -> Integers:
    """Columns of a slab."""
    slabs: Integers = -(-rank // RANK_TILE) * RANK_TILE
    return slabs


def _rows(
    parts: Sequence[TaskPart | GroupSegment],
    masks: Sequence[DropoutMask | None],
    groups: Sequence[int],
) -> StaticRows:
    count = len(parts)
    table = np.zeros((count, COLUMNS), np.int64)
    table[:, SLOT:B] = -1
    factor, addresses, rounds = np.empty(count), np.zeros(count, np.int64), np.zeros(count, np.int64)
    seen: dict[int, int] = {}
    for row, (part, mask, group) in enumerate(zip(parts, masks, groups, strict=True)):
        if part.members and part.members[-1] >= MEMBERS:
            raise ValueError(
                f"{part.members[-1] + 1} linear modules share their input; the kernels know {MEMBERS}"
            )
        own = table[row]
        slab = -(-part.rank // RANK_TILE) * RANK_TILE
        own[RANK], own[SLABS] = part.rank, len(part.members)
        own[A], own[GRAD_A] = part.a.data_ptr(), part.grad_a.data_ptr()
        own[THRESHOLD], own[MODULE_KEY] = (KEEP_ALL, 0) if mask is None else (mask.threshold, mask.module_key)
        factor[row] = part.scale if mask is None else part.scale * mask.rescale
        step = slab * len(part.members) * part.a.shape[1]
        for position, member in enumerate(part.members):
            b, grad_b = part.b[position], part.grad_b[position]
            own[SLOT + member], own[PARTIAL_B + member] = position, step
            own[B + member], own[GRAD_B + member] = b.data_ptr(), grad_b.data_ptr()
            step += slab * b.shape[0]
        own[PARTIAL_STEP] = step
        addresses[row] = np.bitwise_or.reduce(own[[A, GRAD_A, *range(B, PARTIAL_B)]])
        rounds[row] = seen.get(group, 0)
        seen[group] = seen.get(group, 0) + 1
    table[:, FACTOR] = factor.astype(np.float32).view(np.int32)
    return StaticRows(
        table,
        np.array(groups, np.int64),
        rounds,
        padded(table[:, RANK]) * table[:, SLABS],
        factor,
        addresses,
        np.array([mask is not None for mask in masks], np.int64),
        [(part.a, *part.b) for part in parts],
    )
