"""What a row of few bytes would become in memory is bounded before it is made."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.data.errors import DataError
from mlora_worker.data.reading import row_bounds
from mlora_worker.data.reading.parquet import parquet_rows
from mlora_worker.data.reading.records import csv_rows, json_array, json_lines
from mlora_worker.data.reading.row_formats import read_rows
from mlora_worker.data.reading.row_types import InvalidRow, Record
from mlora_worker.protocol import DatasetFields, DatasetFormat
from tests.fixtures.one_file import OneFile

MIB = 2**20
JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a,:[]{}"\\\n€'), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)
SMALL_ROW = b'{"prompt": "a", "completion": "b"}'
# Each has more values and names than a row may have, and not one useful text.
GROWING = {
    "empty lists": b'{"prompt": [' + b",".join([b"[]"] * (MIB // 3)) + b"]}",
    "empty objects": b'{"prompt": [' + b",".join([b"{}"] * (MIB // 3)) + b"]}",
    "objects of one value": b'{"prompt": [' + b",".join([b'{"":0}'] * 75_000) + b"]}",
    "lists in lists": b'{"prompt": [' + b",".join([b"[[[[]]]]"] * (MIB // 9)) + b"]}",
    "empty texts of an unknown column": b'{"x": [' + b",".join([b'"a"'] * (MIB // 4)) + b"]}",
    "lists before the row is broken off": b'{"prompt": [' + b",".join([b"[]"] * (MIB // 3)),
}


def signs_before(value: Any) -> int:
    """One before each value and name in ``value``, and one in each empty list and object."""
    if isinstance(value, list):
        return sum(1 + signs_before(one) for one in value) or 1
    if isinstance(value, dict):
        return sum(2 + signs_before(one) for one in value.values()) or 1
    return 0


@given(value=JSON, most=st.integers(0, 40), indent=st.sampled_from([None, 1]), escaped=st.booleans())
def test_the_count_is_that_of_the_values_which_are_made(
    value: Any, most: int, indent: int | None, escaped: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=escaped).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_bounds, "MOST_VALUES", most)
        patch.setattr(row_bounds, "_AT_ONCE", 7)
        assert row_bounds.has_too_many_values(text) is (signs_before(value) > most)


def peak(read: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("story", "array"),
    [*((one, False) for one in GROWING), ("empty lists", True), ("objects of one value", True)],
)
def test_a_row_that_would_grow_in_memory_is_a_flaw_and_takes_little(
    story: str, array: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_bounds, "_AT_ONCE", 2**14)  # what is held to count takes little beside these rows
    row = GROWING[story]
    found: list[Record] = []
    data = b"[" + row + b"]" if array else row + b"\n" + SMALL_ROW

    def read() -> None:
        found.extend((json_array if array else json_lines)([data]))

    assert peak(read) < 6 * len(row)
    flaw = found[0].value
    assert isinstance(flaw, InvalidRow)
    assert "has more than 200,000 values and names" in flaw.message
    if not array:
        assert found[1].value == json.loads(SMALL_ROW), "the next line is read as always"


def test_a_long_text_full_of_signs_is_a_row_like_any_other() -> None:
    text = 'f(a, b)[c]: {d}, \\"e\\" ' * 100_000
    row = {"prompt": text, "completion": "ok"}
    assert list(json_lines([json.dumps(row).encode()])) == [Record(1, row)]
    assert list(json_array([json.dumps([row]).encode()])) == [Record(1, row)]


def test_a_conversation_of_many_rounds_is_a_row_like_any_other() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 4000
    (record,) = json_lines([json.dumps({"messages": turns}).encode()])
    assert not isinstance(record.value, InvalidRow)


def test_the_task_fails_with_the_line() -> None:
    lines = json_lines([SMALL_ROW + b"\n" + GROWING["empty lists"]])
    with pytest.raises(DataError, match=r"line 2: has more than 200,000 values and names, .* split the row"):
        list(read_rows(lines, DatasetFormat.PROMPT_COMPLETION, DatasetFields(), "rows.jsonl"))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_a_row_nested_too_deeply_is_a_flaw_of_its_own(opening: bytes) -> None:
    first, second = json_lines([opening * 100_000 + b"\n" + SMALL_ROW])
    assert first.value == InvalidRow("nests lists and objects too deeply to be read")
    assert second.value == json.loads(SMALL_ROW)


def test_a_csv_header_of_many_columns_is_read_in_linear_time() -> None:
    names = b",".join(b"%d" % number for number in range(300_000))
    began = time.process_time()
    (record,) = csv_rows([names + b"\n1,2\n"])
    assert time.process_time() - began < 5
    assert record.value == InvalidRow("names 300,000 columns, and may name 10,000")


def test_a_csv_row_of_nothing_but_commas_is_a_flaw() -> None:
    found = list(csv_rows([b"a,b\n1,2\n" + b"," * 2_000_000 + b"\n"]))
    assert found[0].value == {"a": "1", "b": "2"}
    assert isinstance(found[1].value, InvalidRow)
    assert "has more than 1,000,000 commas" in found[1].value.message


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (pa.list_(pa.list_(pa.int32())), [[]] * 300_000),
        (pa.list_(pa.int32()), [1] * 300_000),
        (pa.list_(pa.struct([("a", pa.int32())])), [{"a": 1}] * 150_000),
        (pa.map_(pa.string(), pa.int32()), [("a", 1)] * 300_000),
        (pa.struct([("a", pa.list_(pa.int32()))]), {"a": [1] * 300_000}),
    ],
)
def test_a_parquet_row_of_many_values_is_a_flaw_and_the_others_are_whole(kind: Any, row: Any) -> None:
    small: Any = {"a": [1]} if pa.types.is_struct(kind) else None
    out = io.BytesIO()
    pa.parquet.write_table(pa.table({"value": pa.array([small, row, small], kind)}), out)
    found = list(parquet_rows(OneFile(out.getvalue()), "rows", ("value",)))
    assert [isinstance(record.value, InvalidRow) for record in found] == [False, True, False]
    assert found[0].value == {"value": small}
    assert "200,000 values" in str(found[1].value)


def test_a_parquet_list_of_fixed_length_is_counted_too() -> None:
    out = io.BytesIO()
    pa.parquet.write_table(pa.table({"value": pa.array([[1] * 300_000], pa.list_(pa.int32(), 300_000))}), out)
    (record,) = parquet_rows(OneFile(out.getvalue()), "rows", ("value",))
    assert isinstance(record.value, InvalidRow)


def test_the_longest_row_leaves_rank_0_its_memory() -> None:
    """In a process with 64 MiB of row and 700 MiB of address space beyond what it has."""
    code = (
        "import resource\n"
        "from mlora_worker.data.reading.records import json_lines\n"
        "row = b'{\"a\":[' + b'[],' * (21 * 2**20) + b'[]]}'\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 700 * 2**20,) * 2)\n"
        "(record,) = json_lines([row])\n"
        "print(record.value.message)\n"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "has more than 200,000 values" in made.stdout, made.stderr
