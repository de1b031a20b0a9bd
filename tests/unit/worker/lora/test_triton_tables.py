"""Tables for the Triton kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mlora_worker.lora.dropout import dropout_mask, token_keys
from mlora_worker.lora.groups import GroupSegment
from mlora_worker.lora.triton_rows import (
    CHUNKS,
    END_ROW,
    FIRST_ROW,
    KEEP_ALL,
    LOW,
    PARTIAL,
    PARTIAL_STEP,
    SLOT,
    THRESHOLD,
    A,
    B,
    padded,
)
from mlora_worker.lora.triton_tables import TableGroup, build_tables

CPU = torch.device("cpu")
INPUTS, OUTPUTS = 10, 6


def segment(
    start: int, stop: int, rank: int = 16, members: tuple[int, ...] = (0, 1), dropout: float = 0.0
) -> GroupSegment:
    a = torch.zeros(len(members) * rank, INPUTS)
    b = tuple(torch.zeros(OUTPUTS, rank) for _ in members)
    keys = token_keys(start, 1, 0, (stop - start,))
    return GroupSegment(
        rows=slice(start, stop),
        rank=rank,
        members=members,
        a=a,
        b=b,
        grad_a=torch.zeros_like(a),
        grad_b=tuple(torch.zeros_like(own) for own in b),
        scale=2.0,
        weight=0.25,
        mask=dropout_mask(keys, "m", INPUTS, dropout) if dropout else None,
    )


def tables(*groups: list[GroupSegment]) -> list[TableGroup]:
    return build_tables(groups, tile=16, chunk=32, device=CPU)


def test_tiles_and_chunks_start_at_their_segment() -> None:
    (group,) = tables([segment(0, 17), segment(17, 20), segment(25, 65)])
    assert group.tiles.tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1], [2, 2]]
    assert group.chunks.tolist() == [[0, 0], [1, 0], [2, 0], [2, 1]]
    assert group.table[:, [FIRST_ROW, END_ROW, CHUNKS]].tolist() == [[0, 17, 1], [17, 20, 1], [25, 65, 2]]


def test_what_is_saved_is_padded_to_the_tile_not_to_the_largest_rank() -> None:
    assert padded(np.array([1, 16, 17, 64])).tolist() == [16, 16, 32, 64]
    small, large = segment(0, 10, rank=1, members=(2,)), segment(10, 30, rank=64)
    (group,) = tables([small, large])
    assert group.low_elements == 10 * 16 + 20 * 128
    assert (group.widest_slab, group.widest) == (64, 128)
    assert group.table[:, LOW].tolist() == [0, 10 * 16]
    assert group.partial_elements == 16 * (INPUTS + OUTPUTS) + 128 * INPUTS + 2 * 64 * OUTPUTS
    assert group.table[:, PARTIAL].tolist() == [0, group.table[0, PARTIAL_STEP].item()]


def test_members_that_a_task_does_not_adapt_have_no_slab() -> None:
    own = segment(0, 4, members=(1, 3))
    (group,) = tables([own])
    row = group.table[0].tolist()
    assert row[SLOT : SLOT + 4] == [-1, 0, -1, 1]
    assert row[B : B + 4] == [0, own.b[0].data_ptr(), 0, own.b[1].data_ptr()]
    assert row[A] == own.a.data_ptr()


def test_token_keys_lie_where_their_rows_do() -> None:
    dropping, other = segment(3, 8, dropout=0.5), segment(0, 3)
    first, second = tables([other, dropping], [other])
    assert dropping.mask is not None
    assert first.token_keys is not None
    assert torch.equal(first.token_keys[3:8], dropping.mask.token_keys)
    assert first.table[:, THRESHOLD].tolist() == [KEEP_ALL, dropping.mask.threshold]
    assert second.token_keys is None, "nobody drops out there"


def test_token_keys_reach_to_the_last_row_of_segments_that_keep_everything() -> None:
    (group,) = tables([segment(0, 3, dropout=0.5), segment(3, 40)])
    assert group.token_keys is not None
    assert len(group.token_keys) == 40


def test_every_part_starts_at_16_bytes() -> None:
    for group in tables([segment(0, 17)], [segment(0, 17, dropout=0.5), segment(17, 20)], [segment(17, 20)]):
        for part in (group.table, group.tiles, group.chunks, group.token_keys):
            assert part is None or part.storage_offset() % 2 == 0


@pytest.mark.parametrize(
    ("ranks", "vector"), [((16, 64), 8), ((16, 4), 4), ((12,), 4), ((8, 3), 1), ((2,), 1)]
)
def test_a_rank_of_one_task_narrows_the_loads_of_b_alone(ranks: tuple[int, ...], vector: int) -> None:
    (group,) = tables([segment(4 * i, 4 * i + 4, rank=rank) for i, rank in enumerate(ranks)])
    assert group.vector == vector
    assert group.aligned == all(
        tensor.data_ptr() % 16 == 0 for one in group for tensor in (one.a, *one.b, one.grad_a, *one.grad_b)
    )


def test_an_empty_group_among_others_stays_empty() -> None:
    empty, full = tables([], [segment(0, 4)])
    assert (len(empty), len(full)) == (0, 1)
