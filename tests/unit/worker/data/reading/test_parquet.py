"""Parquet files that are small and stand for long rows, and files that are damaged, are errors of their own task."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from mlora_worker.data.reading.compression import Undecodable
from mlora_worker.data.reading.parquet import parquet_rows
from mlora_worker.data.reading.row_types import InvalidRow, Record
from mlora_worker.storage.errors import StoreUnreachable
from tests.fixtures.one_file import OneFile

LONG = "x" * 1000


def parquet(columns: dict[str, Any], **options: Any) -> bytes:
    out = io.BytesIO()
    pa.parquet.write_table(pa.table(columns), out, **options)
    return out.getvalue()


def turns(*contents: str | None) -> list[dict[str, str | None]]:
    return [{"role": "user", "content": content} for content in contents]


@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize(
    ("values", "long"),
    [
        ([LONG, "a", LONG + "x", None, LONG], [3]),
        ([turns("a", None), None, turns(*["x" * 100] * 40), [], turns("b")], [3]),
        ([{"text": LONG, "more": [LONG]}, None, {"text": "a", "more": None}], [1]),
        ([[["a"], ["b" * 600, "b" * 600]], [["c"]]], [1]),
        ([1, None, 3], []),
        ([[1.5] * 200, [2.5]], [1]),
    ],
)
def test_rows_that_are_too_long_are_flaws_and_the_others_are_whole(
    values: list[Any], long: list[int], dictionary: bool
) -> None:
    data = parquet({"value": values, "unused": [LONG * 2] * len(values)}, use_dictionary=dictionary)
    records = list(parquet_rows(OneFile(data), "rows", ("value",), longest=1000))
    assert [record.number for record in records if isinstance(record.value, InvalidRow)] == long
    expected = [Record(number, {"value": value}) for number, value in enumerate(values, 1)]
    assert [record for record in records if record.number not in long] == [
        record for record in expected if record.number not in long
    ]


def test_one_long_value_that_many_rows_refer_to_is_in_memory_once() -> None:
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 400, pa.int32()), pa.array(["x" * 2**20]))
    data = parquet({"prompt": values, "n": list(range(400))}, store_schema=False)  # read back as plain text
    before = pa.total_allocated_bytes()
    rows = parquet_rows(OneFile(data), "rows", ("prompt", "n"))
    first = next(rows).value
    assert not isinstance(first, InvalidRow)
    assert (len(first["prompt"]), first["n"]) == (2**20, 0)
    assert pa.total_allocated_bytes() - before < 50 * 2**20


# Three groups of rows, each of two batches but for the last, and more than a small dictionary takes.
COUNT, IN_GROUP, AT_ONCE = 303, 140, 100
TEXTS = [f"common beginning, row {row}" for row in range(COUNT - 3)] + [None, "", "€\U0001f600"]
TALKS = [turns("a" * (row % 7), None, f"€ {row}") if row % 5 else None for row in range(COUNT)]
NUMBERS = {"n": [*range(COUNT - 1), None], "x": [row / 7 for row in range(COUNT)]}


@pytest.mark.parametrize("version", ["1.0", "2.0"], ids=["pages 1", "pages 2"])
@pytest.mark.parametrize(
    "encoding",
    ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "dictionary", "dictionary, then plain"],
)
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "brotli", "lz4", "zstd"])
def test_rows_are_the_same_however_they_are_stored(encoding: str, compression: str, version: str) -> None:
    columns = {"text": TEXTS, "talk": TALKS, **NUMBERS}
    leaves = ("text", "talk.list.element.role", "talk.list.element.content")
    options: dict[str, Any] = {"use_dictionary": list(leaves), "dictionary_pagesize_limit": 2**20}
    if encoding == "dictionary, then plain":
        options |= {"dictionary_pagesize_limit": 500, "write_batch_size": 64}
    elif encoding != "dictionary":
        kinds = dict.fromkeys(leaves, encoding) | {"n": "DELTA_BINARY_PACKED", "x": "BYTE_STREAM_SPLIT"}
        options = {"use_dictionary": False, "column_encoding": kinds}
    data = parquet(
        columns, compression=compression, data_page_version=version, row_group_size=IN_GROUP, **options
    )
    expected = pa.parquet.read_table(io.BytesIO(data)).to_pylist()
    found = parquet_rows(OneFile(data), "rows", tuple(columns), at_once=AT_ONCE)
    assert [record.value for record in found] == expected


def test_texts_that_are_stored_as_differences_do_not_fill_the_memory() -> None:
    long = "x" * 2**20
    data = parquet(
        {"prompt": [long] * 200}, use_dictionary=False, column_encoding={"prompt": "DELTA_BYTE_ARRAY"}
    )
    assert len(data) < 2**18
    before = pa.total_allocated_bytes()
    rows = parquet_rows(OneFile(data), "rows", ("prompt",))
    assert next(rows).value == {"prompt": long}
    assert pa.total_allocated_bytes() - before < 40 * 2**20
    assert sum(1 for _ in rows) == 199


def test_what_the_library_cannot_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: Any, **__: Any) -> None:
        raise pa.lib.ArrowNotImplementedError("LZO codec not implemented")

    monkeypatch.setattr(pa.parquet.ParquetFile, "iter_batches", lacks)
    with pytest.raises(Undecodable, match=r"unsupported feature \(LZO codec .* write it again"):
        list(parquet_rows(OneFile(parquet({"prompt": ["a"]})), "rows", ("prompt",)))


def test_a_damaged_page_is_a_flaw_of_the_file() -> None:
    data = bytearray(parquet({"prompt": [f"{LONG}{row}" for row in range(3000)]}, use_dictionary=False))
    for at in range(2000, 40_000, 7):
        data[at] ^= 0x5A
    with pytest.raises(Undecodable, match="not a readable Parquet file"):
        list(parquet_rows(OneFile(bytes(data)), "rows", ("prompt",)))


def test_a_store_that_goes_away_is_no_flaw_of_the_file() -> None:
    data = parquet({"prompt": [f"{row}" * 300 for row in range(20_000)]}, compression="none")
    with pytest.raises(StoreUnreachable):
        list(parquet_rows(OneFile(data, len(data) // 2), "rows", ("prompt",)))


def test_memory_that_lacks_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: Any, **__: Any) -> None:
        raise pa.lib.ArrowMemoryError("malloc of size 1048576 failed")

    monkeypatch.setattr(pa.parquet.ParquetFile, "iter_batches", lacks)
    with pytest.raises(MemoryError):
        list(parquet_rows(OneFile(parquet({"prompt": ["a"]})), "rows", ("prompt",)))
