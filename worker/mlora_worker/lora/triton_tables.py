"""What the kernels must know of a microbatch, as tables on the device.

Made on the host for all groups of all layers at once, and copied in one piece: no launch depends on the number of segments,
and nothing waits for the device. What does not change between microbatches is written once for each task
(``triton_rows``); the columns that do are filled for all rows together.

Two maps place programs: *tiles* of a few tokens, and *chunks* of many tokens for the sums over tokens. Both start at their
segment's first row, so the order of every addition is that of the segment alone, wherever its rows lie. A group's table
has a row per segment. In the low-rank activations each adapted member of the group has a *slab* of columns: the rank,
padded to ``RANK_TILE``. Nothing is padded to the largest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from torch import Tensor

from mlora_worker.lora.groups import GroupSegment
from mlora_worker.lora.triton_rows import (
    CHUNKS,
    COLUMNS,
    END_ROW,
    FIRST_ROW,
    LOW,
    PARTIAL,
    PARTIAL_STEP,
    RANK,
    STRENGTH,
    VECTORS,
    Integers,
    StaticRows,
    padded,
    rows_of_segments,
)


@dataclass(frozen=True, eq=False)
class TableGroup(Sequence[GroupSegment]):
    """The segments of one input group with their tables on the device."""

    size: int
    operands: tuple[Tensor, ...]  # A and B of the first segment, whose type all have
    make: Callable[[], Sequence[GroupSegment]]  # the segments, for who wants to see them
    table: Tensor  # [segments, COLUMNS] int64
    tiles: Tensor  # [tiles, 2] int64: segment, ordinal of the tile within it
    chunks: Tensor  # [chunks, 2] int64: segment, ordinal of the chunk within it
    token_keys: Tensor | None  # [tokens] int64 of the whole microbatch; None: nobody drops out
    low_elements: int
    partial_elements: int
    widest_slab: int  # columns
    widest: int  # columns of all slabs of one segment
    aligned: bool  # all addresses allow loads of 16 bytes; those of adapters do
    vector: int  # elements of a row of B that a load may take: 8, 4 or 1, by the ranks

    @overload
    def __getitem__(self, index: int) -> GroupSegment: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[GroupSegment]: ...
    def __getitem__(self, index: int | slice) -> GroupSegment | Sequence[GroupSegment]:
        return self.make()[index]

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True, eq=False)
class Placing:
    """Rows of tables with what changes between microbatches. All have an entry per row."""

    rows: StaticRows
    tables: Integers  # which table a row belongs to
    start: Integers  # its segment's tokens
    stop: Integers
    weight: np.typing.NDArray[np.float64]


Keys = Iterable[tuple[slice, Tensor]]  # of tokens
Make = Callable[[Integers], Sequence[GroupSegment]]  # of rows, by their numbers


def build_tables(
    groups: Sequence[Sequence[GroupSegment]], *, tile: int, chunk: int, device: torch.device
) -> list[TableGroup]:
    """One for each group. ``tile``, ``chunk``: tokens of each. Raises ValueError for a group of more modules than the
    kernels know.
    """
    flat = [segment for segments in groups for segment in segments]
    placing = Placing(
        rows_of_segments(flat),
        np.repeat(np.arange(len(groups)), [len(segments) for segments in groups]),
        np.array([segment.rows.start for segment in flat], np.int64),
        np.array([segment.rows.stop for segment in flat], np.int64),
        np.array([segment.weight for segment in flat], np.float64),
    )
    keys = {s.rows.start: (s.rows, s.mask.token_keys) for s in flat if s.mask is not None}
    made = dict(
        fill(
            placing, keys.values(), lambda own: [flat[i] for i in own], tile=tile, chunk=chunk, device=device
        )
    )
    table, places = (torch.empty(0, columns, dtype=torch.int64, device=device) for columns in (COLUMNS, 2))
    empty = TableGroup(0, (), list, table, places, places, None, 0, 0, 0, 0, True, 1)
    return [made.get(number, empty) for number in range(len(groups))]


def fill(
    placing: Placing, keys: Keys, make: Make, *, tile: int, chunk: int, device: torch.device
) -> Iterator[tuple[int, TableGroup]]:
    """Number and table of each group that has rows, all in one copy to the device."""
    if not len(placing.tables):
        return
    order = np.argsort(placing.tables, kind="stable")
    rows, numbers = placing.rows.taken(order), placing.tables[order]
    start, stop = placing.start[order], placing.stop[order]
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
    counts = np.diff(firsts, append=len(numbers))

    def before(sizes: Integers) -> Integers:
        """Of each row, the sum over the rows of its table that precede it."""
        total = np.cumsum(sizes) - sizes
        return total - np.repeat(total[firsts], counts)

    table, chunks = rows.table, -(-(stop - start) // chunk)
    low, partial = rows.width * (stop - start), table[:, PARTIAL_STEP] * chunks
    table[:, FIRST_ROW], table[:, END_ROW], table[:, CHUNKS] = start, stop, chunks
    table[:, LOW], table[:, PARTIAL] = before(low), before(partial)
    table[:, STRENGTH] = (rows.factor * placing.weight[order]).astype(np.float32).view(np.int32)

    spans = list(zip(firsts.tolist(), (firsts + counts).tolist(), strict=True))
    maps, map_of = _maps(start, stop, spans, (tile, chunk))
    tables, drawn, places = _copied(table, maps, keys, int(stop.max()), counts, device)
    sums = [np.add.reduceat(sizes, firsts).tolist() for sizes in (low, partial)]
    most = [np.maximum.reduceat(sizes, firsts).tolist() for sizes in (padded(table[:, RANK]), rows.width)]
    bits = [
        np.bitwise_or.reduceat(own, firsts).tolist() for own in (rows.addresses, table[:, RANK], rows.drops)
    ]
    for index, (first, last) in enumerate(spans):
        addresses, ranks, drops = (own[index] for own in bits)
        yield (
            int(numbers[first]),
            TableGroup(
                size=last - first,
                operands=rows.operands[int(order[first])],
                make=lambda own=order[first:last]: make(own),  # type: ignore[misc]
                table=tables[index],
                tiles=places[2 * map_of[index]],
                chunks=places[2 * map_of[index] + 1],
                token_keys=drawn if drops else None,
                low_elements=sums[0][index],
                partial_elements=sums[1][index],
                widest_slab=most[0][index],
                widest=most[1][index],
                aligned=addresses % 16 == 0,
                vector=next(vector for vector in VECTORS if ranks % vector == 0),
            ),
        )


def _maps(
    start: Integers, stop: Integers, spans: Sequence[tuple[int, int]], sizes: tuple[int, int]
) -> tuple[list[Integers], list[int]]:
    """Of each table its maps, made once for all tables with the same segments: [places, 2], and which pair is whose."""
    known: dict[tuple[bytes, bytes], int] = {}
    maps: list[Integers] = []
    whose = []
    for first, last in spans:
        own = start[first:last], stop[first:last]
        key = own[0].tobytes(), own[1].tobytes()
        if key not in known:
            known[key] = len(known)
            for size in sizes:
                counts = -(-(own[1] - own[0]) // size)
                ordinals = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
                maps.append(np.stack([np.repeat(np.arange(len(counts)), counts), ordinals], axis=1))
        whose.append(known[key])
    return maps, whose


def _copied(
    table: Integers, maps: Sequence[Integers], keys: Keys, tokens: int, counts: Integers, device: torch.device
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Tables, token keys and maps on the device. Kernels that drop out read the keys of all their tokens, also of segments
    that keep everything."""
    keys = list(keys)
    sizes = [COLUMNS * count for count in counts.tolist()] + [one.size for one in maps]
    entries = sum(sizes)
    host = torch.empty(entries + (tokens if keys else 0), dtype=torch.int64, pin_memory=device.type == "cuda")
    numbers = host.numpy()
    np.concatenate([table.reshape(-1), *(one.reshape(-1) for one in maps)], out=numbers[:entries])
    for span, own in keys:
        if own.device.type == "cpu":
            numbers[entries + span.start : entries + span.stop] = own.numpy()
    there = host.to(device, non_blocking=True)
    for span, own in keys:
        if own.device.type != "cpu":
            there[entries + span.start : entries + span.stop] = own
    parts = torch.split(there[:entries], sizes)
    tables = [part.view(-1, COLUMNS) for part in parts[: len(counts)]]
    return tables, there[entries:], [part.view(-1, 2) for part in parts[len(counts) :]]
