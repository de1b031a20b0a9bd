"""The rows that the sides of a benchmark share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.rows import deal, pack, pad, shortest
from mlora_worker.data.prepare import IGNORED, TokenRow

MakeRows = Callable[[int], list[TokenRow]]


def test_steps_take_the_rows_in_order_each_once_and_then_go_round(make_rows: MakeRows) -> None:
    rows = make_rows(12)
    dealt = [row for step in range(3) for task in deal(rows, 2, 2, step).rows for row in task]
    assert [id(row) for row in dealt] == [id(row) for row in rows]
    assert deal(rows, 2, 2, 3).rows == deal(rows, 2, 2, 0).rows


def test_a_batch_counts_real_and_supervised_tokens(make_rows: MakeRows) -> None:
    batch = deal(make_rows(4), 2, 2, 0)
    assert batch.tokens == sum(len(row.ids) for task in batch.rows for row in task)
    assert batch.supervised == tuple(sum(int((row.labels >= 0).sum()) for row in task) for task in batch.rows)


def test_padded_and_packed_rows_hold_the_same_tokens_and_targets(make_rows: MakeRows) -> None:
    rows = make_rows(5)
    padded, packed = pad(rows, multiple=8), pack(rows)
    real = padded.mask.bool()
    assert padded.ids.shape[1] % 8 == 0
    assert torch.equal(padded.ids[real], packed.ids)
    assert torch.equal(padded.targets[real], packed.targets)
    assert (padded.targets[~real] == IGNORED).all()
    assert packed.boundaries[-1] == len(packed.ids) == sum(packed.lengths)
    assert packed.positions.tolist() == [i for row in rows for i in range(len(row.ids))]


def test_unshifted_labels_give_the_targets_after_the_shift_that_transformers_does(
    make_rows: MakeRows,
) -> None:
    padded = pad(make_rows(5))
    shifted = padded.unshifted_labels[:, 1:]
    assert torch.equal(shifted, padded.targets[:, :-1])
    assert (padded.targets[:, -1] == IGNORED).all(), "nothing is lost at the end"
    supervised = shifted != IGNORED
    assert torch.equal(shifted[supervised], padded.ids[:, 1:][supervised])


def test_the_shortest_rows_come_by_length(make_rows: MakeRows) -> None:
    lengths = [len(row.ids) for row in shortest(make_rows(20), 6)]
    assert lengths == sorted(len(row.ids) for row in make_rows(20))[:6]
