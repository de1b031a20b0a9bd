"""Files of rows that somebody has changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlora_worker.data.training_rows.row_files import FolderWriter, open_rows
from mlora_worker.data.training_rows.token_rows import labels_of_pair

TOKENS, SPLIT = 6, 4


def folder_of_pairs(place: Path) -> Path:
    writer = FolderWriter(place, 10_000)
    ids, learnt = np.arange(TOKENS, dtype=np.int32), np.array([0, 0, 1, 1, 0, 1], np.bool_)
    for _ in range(2):
        writer.add(ids, learnt, labels_of_pair(ids, learnt, SPLIT), 3, split=SPLIT)
    writer.finish()
    return place


@pytest.mark.parametrize("split", [-1, 0, TOKENS, TOKENS + 1])
def test_a_pair_that_is_split_outside_of_it_is_refused(tmp_path: Path, split: int) -> None:
    place = folder_of_pairs(tmp_path)
    assert open_rows(place, "digest")[1].lengths == (SPLIT, TOKENS - SPLIT)
    np.array([SPLIT, split], "<i4").tofile(place / "splits.i4")
    with pytest.raises(ValueError, match="split outside"):
        open_rows(place, "digest")


def test_pairs_without_all_their_splits_are_refused(tmp_path: Path) -> None:
    place = folder_of_pairs(tmp_path)
    np.array([SPLIT], "<i4").tofile(place / "splits.i4")
    with pytest.raises(ValueError, match="incomplete"):
        open_rows(place, "digest")
