"""Rows out of bytes, however the bytes are cut into pieces."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.data.reading.records import csv_rows, json_array, json_lines
from mlora_worker.data.reading.row_types import InvalidRow, Record

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
ROWS = st.lists(
    st.dictionaries(
        TEXT,
        st.recursive(
            TEXT | st.none() | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=4
        ),
        max_size=3,
    ),
    max_size=5,
)
ODD = '{"a": "\u2028 \\" ] } \\\\", "b": [1, {"c": "[{"}]}'


def cut(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


@given(rows=ROWS, size=st.integers(1, 40), indent=st.sampled_from([None, 1]), escaped=st.booleans())
def test_an_array_gives_its_objects_wherever_it_is_cut(
    rows: list[dict[str, object]], size: int, indent: int | None, escaped: bool
) -> None:
    data = json.dumps(rows, indent=indent, ensure_ascii=escaped).encode()
    assert list(json_array(cut(data, size))) == [Record(n, row) for n, row in enumerate(rows, 1)]


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_brackets_and_quotes_within_texts_are_no_structure(size: int) -> None:
    found = list(json_array(cut(f" [ {ODD} ,\r\n{ODD} ] \n".encode(), size)))
    assert found == [Record(number, json.loads(ODD)) for number in (1, 2)]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", [(1, "the file is not a JSON array")]),
        (b'{"a": 1}', [(1, "the file is not a JSON array")]),
        (b"[", [(1, "the array is truncated")]),
        (b'[{"a": 1},', [(2, "the array is truncated")]),
        (b'[{"a": 1}, {"b": [', [(2, "the array is truncated")]),
        (b'[{"a": "x', [(1, "the array is truncated")]),
        (b'[{"a": 1} {"b": 2}]', [(2, "a comma is missing before it")]),
        (b'[{"a": 1}] x', [(2, "there is text after the end of the array")]),
        (
            b'[{"a": }, {"b": 2}, [3], "x", 4]',
            [(1, "not JSON"), (3, "is a list"), (4, "is text"), (5, "a number")],
        ),
        (b'[{"a": "\xff"}, {"a": 1}]', [(1, "not UTF-8 at byte 8")]),
    ],
)
def test_each_flaw_of_an_array_is_told_at_its_row(data: bytes, told: list[tuple[int, str]]) -> None:
    flaws = [
        (record.number, record.value.message)
        for record in json_array([data])
        if isinstance(record.value, InvalidRow)
    ]
    assert [number for number, _ in flaws] == [number for number, _ in told]
    for (_, flaw), (_, expected) in zip(flaws, told, strict=True):
        assert expected in flaw


@given(
    rows=st.lists(
        st.tuples(TEXT.filter(lambda text: "\0" not in text), TEXT.filter(lambda text: "\0" not in text)),
        max_size=6,
    ),
    size=st.integers(1, 40),
    ending=st.sampled_from(["\n", "\r\n"]),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
def test_a_csv_file_gives_its_rows_whatever_stands_within_quotes(
    rows: list[tuple[str, str]], size: int, ending: str, mark: bytes
) -> None:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=ending, quoting=csv.QUOTE_ALL)
    writer.writerows([("prompt", "completion"), *rows])
    found = [record.value for record in csv_rows(cut(mark + out.getvalue().encode(), size))]
    assert found == [{"prompt": prompt, "completion": answer} for prompt, answer in rows]


def test_csv_rows_are_numbered_by_the_line_that_they_begin_in() -> None:
    data = b'a,b\r\n1,"x\ny"\r\n\r\n2\r\n3,4\r\n'
    assert list(csv_rows([data])) == [
        Record(2, {"a": "1", "b": "x\ny"}),
        Record(5, InvalidRow("has 1 values, the first row names 2 columns")),
        Record(6, {"a": "3", "b": "4"}),
    ]


@pytest.mark.parametrize(
    ("data", "number", "told"),
    [
        (b'a,b\n1,"2', 2, "not CSV (unexpected end of data)"),
        (b"a,b\n1,2\n\xff,3\n4,5\n", 3, "not UTF-8 at byte 1"),
        (b'a,b\n1,"\n\xff', 3, "not UTF-8 at byte 1"),
        (b'a,b\n"1"x,2\n', 2, "not CSV"),
        (b"a,a\n1,2\n", 1, "has more than one column 'a'"),
    ],
)
def test_what_makes_the_rest_of_a_csv_file_unreadable_is_told_and_ends_it(
    data: bytes, number: int, told: str
) -> None:
    last = list(csv_rows([data]))[-1]
    assert isinstance(last.value, InvalidRow)
    assert (last.number, told in last.value.message) == (number, True)


def test_a_csv_row_of_many_lines_is_bounded_as_a_line_is() -> None:
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        yield b'a,b\n1,2\n\n3,"'
        while True:
            read += 10
            assert read < 10_000
            yield b"123456789\n"

    first, flaw = csv_rows(endless(), longest=1000)
    assert first == Record(2, {"a": "1", "b": "2"})
    assert flaw.number == 4
    assert isinstance(flaw.value, InvalidRow)
    assert "is longer than" in flaw.value.message


def test_many_csv_rows_are_together_longer_than_one_may_be() -> None:
    assert len(list(csv_rows([b"a,b\n", b"12345,6789\n" * 500], longest=10))) == 500


def test_csv_that_is_read_as_json_lines_is_told_how_to_say_so() -> None:
    (header, _) = json_lines([b"prompt,completion\na,b\n"])
    assert isinstance(header.value, InvalidRow)
    assert header.value.message.endswith("or for CSV set dataset.fileFormat: csv")
