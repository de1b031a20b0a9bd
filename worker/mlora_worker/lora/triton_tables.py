"""What the kernels must know of a microbatch, as tables on the device.

Made on the host from the group segments, for all groups of all layers at once, and copied in one piece: no launch depends
on the number of segments, and nothing waits for the device.

Two maps place programs: *tiles* of a few tokens, and *chunks* of many tokens for the sums over tokens. Both start at their
segment's first row, so the order of every addition is that of the segment alone, wherever its rows lie. A group's table
has a row per segment. In the low-rank activations each adapted member of the group has a *slab* of columns: the rank,
padded to ``RANK_TILE``. Nothing is padded to the largest rank.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from mlora_worker.lora.groups import GroupSegment

RANK_TILE = 16  # the least that the matrix units multiply
MEMBERS = 4  # most linear modules that share their input; q, k and v are three
KEEP_ALL = 2**30  # a mask's threshold where nothing is dropped

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


@dataclass(frozen=True, eq=False)
class TableGroup(Sequence[GroupSegment]):
    """The segments of one input group with their tables on the device."""

    segments: tuple[GroupSegment, ...]
    table: Tensor  # [segments, COLUMNS] int64
    tiles: Tensor  # [tiles, 2] int64: segment, ordinal of the tile within it
    chunks: Tensor  # [chunks, 2] int64: segment, ordinal of the chunk within it
    token_keys: Tensor | None  # [tokens] int64 of the whole microbatch; None: nobody drops out
    low_elements: int
    partial_elements: int
    widest_slab: int  # columns
    widest: int  # columns of all slabs of one segment
    aligned: bool  # all addresses and ranks allow loads of 16 bytes

    @overload
    def __getitem__(self, index: int) -> GroupSegment: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[GroupSegment]: ...
    def __getitem__(self, index: int | slice) -> GroupSegment | Sequence[GroupSegment]:
        return self.segments[index]

    def __len__(self) -> int:
        return len(self.segments)


def build_tables(
    groups: Sequence[Sequence[GroupSegment]], *, tile: int, chunk: int, device: torch.device
) -> list[TableGroup]:
    """``tile``, ``chunk``: tokens of each. Raises ValueError for a group of more than ``MEMBERS`` modules."""
    rows = [tuple((s.rows.start, s.rows.stop) for s in segments) for segments in groups]
    entries = array("q")
    plans = [_table(segments, chunk, entries) for segments in groups]
    maps = {}
    for own in dict.fromkeys(rows):
        maps[own] = _count(own, tile), _count(own, chunk)
        for size in (tile, chunk):
            _append_map(own, size, entries)
    keys = {
        s.rows.start: (s.rows, s.mask.token_keys)
        for segments in groups
        for s in segments
        if s.mask is not None
    }
    # Kernels that drop out read the keys of all their tokens, also of segments that keep everything.
    tokens = max(stop for own in rows for _, stop in own) if keys else 0

    host = torch.empty(len(entries) + tokens, dtype=torch.int64, pin_memory=device.type == "cuda")
    if entries:
        host[: len(entries)] = torch.frombuffer(entries, dtype=torch.int64)
    for span, own_keys in keys.values():
        if own_keys.device.type == "cpu":
            host[len(entries) + span.start : len(entries) + span.stop] = own_keys
    there = host.to(device, non_blocking=True)
    for span, own_keys in keys.values():
        if own_keys.device.type != "cpu":
            there[len(entries) + span.start : len(entries) + span.stop] = own_keys

    sizes = [plan.entries for plan in plans] + [2 * count for counts in maps.values() for count in counts]
    parts = iter(torch.split(there[: len(entries)], sizes))
    tables = [next(parts).view(-1, COLUMNS) for _ in plans]
    placed = {own: (next(parts).view(-1, 2), next(parts).view(-1, 2)) for own in maps}
    token_keys = there[len(entries) :]
    return [
        TableGroup(
            segments=tuple(segments),
            table=table,
            tiles=placed[own][0],
            chunks=placed[own][1],
            token_keys=token_keys if any(s.mask is not None for s in segments) else None,
            low_elements=plan.low_elements,
            partial_elements=plan.partial_elements,
            widest_slab=plan.widest_slab,
            widest=plan.widest,
            aligned=plan.aligned,
        )
        for segments, own, plan, table in zip(groups, rows, plans, tables, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Plan:
    entries: int
    low_elements: int
    partial_elements: int
    widest_slab: int
    widest: int
    aligned: bool


def _table(segments: Sequence[GroupSegment], chunk: int, entries: array[int]) -> _Plan:
    """Appends the rows of one group's table to ``entries``."""
    before, low, partial, widest_slab, widest = len(entries), 0, 0, 0, 0
    addresses, ranks = 0, 0
    for segment in segments:
        members = segment.members
        if members and members[-1] >= MEMBERS:
            raise ValueError(
                f"{members[-1] + 1} linear modules share their input; the kernels know {MEMBERS}"
            )
        slab = padded(segment.rank)
        width = slab * len(members)
        slot, b, grad_b, partial_b = [-1] * MEMBERS, [0] * MEMBERS, [0] * MEMBERS, [0] * MEMBERS
        step = width * segment.a.shape[1]
        for position, member in enumerate(members):
            own, own_grad = segment.b[position], segment.grad_b[position]
            slot[member], partial_b[member] = position, step
            b[member], grad_b[member] = own.data_ptr(), own_grad.data_ptr()
            step += slab * own.shape[0]
            addresses |= b[member] | grad_b[member]
        a, grad_a = segment.a.data_ptr(), segment.grad_a.data_ptr()
        addresses |= a | grad_a
        ranks |= segment.rank
        start, stop = segment.rows.start, segment.rows.stop
        chunks = -(-(stop - start) // chunk)
        factor, mask = segment.factor, segment.mask
        entries.extend((
            start, stop, segment.rank, len(members), low, a, grad_a,
            KEEP_ALL if mask is None else mask.threshold, 0 if mask is None else mask.module_key,
            _bits(factor), _bits(factor * segment.weight), partial, step, chunks, *slot, *b, *grad_b, *partial_b,
        ))  # fmt: skip
        low += width * (stop - start)
        partial += step * chunks
        widest_slab, widest = max(widest_slab, slab), max(widest, width)
    return _Plan(
        len(entries) - before,
        low,
        partial,
        widest_slab,
        widest,
        aligned=addresses % 16 == 0 and ranks % 8 == 0,
    )


def padded(rank: int) -> int:
    """Columns of a slab."""
    return -(-rank // RANK_TILE) * RANK_TILE


def _count(rows: tuple[tuple[int, int], ...], size: int) -> int:
    return sum(-(-(stop - start) // size) for start, stop in rows)


def _append_map(rows: tuple[tuple[int, int], ...], size: int, entries: array[int]) -> None:
    for segment, (start, stop) in enumerate(rows):
        for ordinal in range(-(-(stop - start) // size)):
            entries.extend((segment, ordinal))


def _bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
