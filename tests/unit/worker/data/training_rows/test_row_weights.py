"""Weights of rows on their way from a file's column to the microbatch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.data.errors import DataError
from mlora_worker.data.prepare import Prepared, prepare
from mlora_worker.data.reading.row_formats import columns_of, read_rows
from mlora_worker.data.reading.row_types import Chat, Record
from mlora_worker.data.training_rows.row_cache import RowCache
from mlora_worker.data.training_rows.row_weights import relative_weights, weighted_sum
from mlora_worker.data.training_rows.token_rows import MemoryWriter, TokenRow, labels_of, rows_digest
from mlora_worker.protocol import (
    Dataset,
    DatasetFields,
    DatasetFormat,
    FailureReason,
    StorageAccess,
    Training,
)
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import open_sources

SOURCE = open_sources(open_store(StorageAccess(), allow_files=True), StorageAccess())


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer(None, specials=["<eos>"], eos_token="<eos>")


def dataset(*weights: Any, **more: Any) -> Dataset:
    rows = [{"prompt": f"{place}", "completion": " a", "w": weight} for place, weight in enumerate(weights)]
    return Dataset.model_validate(
        {"inline": "\n".join(map(json.dumps, rows)), "fields": {"weight": "w"}, **more}
    )


def run(data: Dataset, tokenizer: Any, cache: RowCache | None = None) -> Prepared:
    return prepare(data, Training(), tokenizer, SOURCE, 1000, cache=cache)


def test_each_row_has_the_number_of_its_column(tokenizer: Any) -> None:
    prepared = run(dataset(1, 0.5, 3e-7, 12), tokenizer)
    assert [row.weight for row in prepared.rows] == [1.0, 0.5, 3e-7, 12.0]
    assert [row.weight for row in run(dataset(1, 2, fields={}), tokenizer).rows] == [1.0, 1.0]


def test_a_row_that_weighs_nothing_is_counted_and_left_out(tokenizer: Any) -> None:
    counts = run(dataset(1, 0, 0.0, 2), tokenizer).counts
    assert (counts.used, counts.dropped, counts.first_dropped) == (
        2,
        {"ZeroWeight": 2},
        {"ZeroWeight": (2, 3)},
    )
    with pytest.raises(DataError, match=r"ZeroWeight 1 .*check dataset.fields.weight"):
        run(dataset(0), tokenizer)


@pytest.mark.parametrize(
    ("weight", "told"),
    [
        (-0.5, "column 'w' is -0.5; a weight is 0 or more, and finite"),
        (math.nan, "column 'w' is nan; a weight is 0 or more"),
        (math.inf, "column 'w' is inf; a weight is 0 or more"),
        ("heavy", "column 'w' is text, not a number to weigh the row by"),
        (None, "column 'w' is null, not a number"),
        (True, "column 'w' is a boolean, not a number"),
        ([1], "column 'w' is a list, not a number"),
        (10**400, "column 'w' is a number, not a number"),
    ],
)
def test_what_is_no_weight_is_named_with_its_line(tokenizer: Any, weight: Any, told: str) -> None:
    with pytest.raises(DataError) as caught:
        run(dataset(1, weight), tokenizer)
    assert caught.value.reason is FailureReason.INVALID_ROW
    assert "line 2: " in str(caught.value)
    assert told in str(caught.value)


def test_a_column_that_is_not_there_says_where_to_name_it(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"no column 'x'.*name the right one in dataset.fields.weight"):
        run(dataset(1, fields={"weight": "x"}), tokenizer)


@pytest.mark.parametrize("format", DatasetFormat)
def test_the_column_is_read_of_files_of_columns_too(format: DatasetFormat) -> None:
    assert "w" in columns_of(format, DatasetFields(weight="w"))
    assert None not in columns_of(format, DatasetFields())


def test_parquet_may_have_weights_as_decimals() -> None:
    row = Record(1, {"prompt": "a", "completion": "b", "w": Decimal("1.5")})
    (found,) = read_rows([row], DatasetFormat.PROMPT_COMPLETION, DatasetFields(weight="w"), "rows.parquet")
    assert isinstance(found, Chat)
    assert found.weight == 1.5


def test_csv_has_weights_as_text(tokenizer: Any) -> None:
    data = Dataset.model_validate(
        {
            "inline": "prompt,completion,w\na,b,0.25\nc,d, 3 \n",
            "fileFormat": "csv",
            "fields": {"weight": "w"},
        }
    )
    assert [row.weight for row in run(data, tokenizer).rows] == [0.25, 3.0]


def test_kept_rows_have_their_weights_and_chosen_ones_theirs(tokenizer: Any, tmp_path: Path) -> None:
    cache = RowCache(tmp_path, "team-a")
    data = dataset(*range(1, 9), heldOut=0.4)
    first, again = run(data, tokenizer, cache), run(data, tokenizer, cache)
    memory = run(data, tokenizer)
    for made in (first, again):
        for found, wanted in ((made.rows, memory.rows), (made.held_out, memory.held_out)):
            assert [row.weight for row in found] == [row.weight for row in wanted]
            assert found.digest() == wanted.digest()
    assert {*(row.weight for row in (*memory.rows, *memory.held_out))} == {float(one) for one in range(1, 9)}


def test_folders_from_before_there_were_weights_are_read(tokenizer: Any, tmp_path: Path) -> None:
    cache, data = RowCache(tmp_path, "team-a"), dataset(1, 1)
    first = run(data, tokenizer, cache)
    (file,) = tmp_path.glob("*/*/weights.f8")
    file.unlink()
    assert run(data, tokenizer, cache).rows.digest() == first.rows.digest()
    assert not file.exists()


def row(weight: float = 1.0, tokens: int = 3) -> TokenRow:
    ids = np.arange(tokens, dtype=np.int32)
    return TokenRow(ids, labels_of(ids, ids >= 0), weight)


def test_a_digest_tells_weights_and_is_what_it_was_without_them() -> None:
    digests = [rows_digest([row(one), row(other)]) for one, other in ((1, 1), (2, 1), (1, 2), (0.5, 1))]
    assert len(set(digests)) == 4
    assert rows_digest([row(), row()]) == rows_digest(
        [TokenRow(one.ids, one.labels) for one in (row(), row())]
    )


def test_a_writer_in_memory_keeps_none_where_all_are_one() -> None:
    writer = MemoryWriter()
    one = row()
    writer.add(one.ids, one.labels >= 0, one.labels, 2)
    assert writer.finish()._weights is None


@given(weights=st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=8))
def test_relative_weights_are_at_most_one_and_keep_their_ratios(weights: list[float]) -> None:
    found = relative_weights([row(weight) for weight in weights])
    if found is None:
        assert len(set(weights)) == 1
        return
    assert max(found) == 1.0
    assert all(0 <= one <= 1 for one in found)
    largest = max(weights)
    for one, weight in zip(found, weights, strict=True):
        assert one == pytest.approx(weight / largest, rel=1e-12, abs=0)


def test_supervised_tokens_count_as_their_rows_weigh() -> None:
    assert weighted_sum([3, 5], None) == 8.0
    assert weighted_sum([3, 5], (1.0, 0.5)) == 5.5
    assert weighted_sum([], None) == 0.0
