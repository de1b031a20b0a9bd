from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.storage.remote.line_splitter import LineTooLong, split_lines


@given(text=st.binary().map(lambda raw: raw.replace(b"a", b"\n")), cuts=st.lists(st.integers(0, 50)))
def test_lines_do_not_depend_on_where_the_pieces_are_cut(text: bytes, cuts: list[int]) -> None:
    pieces, rest = [], text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    whole = text.split(b"\n")
    assert list(split_lines([*pieces, rest])) == (whole if whole[-1] else whole[:-1])


def test_only_a_newline_ends_a_line() -> None:
    text = "a\u2028b\x0bc\r\nd".encode()
    assert list(split_lines([text])) == ["a\u2028b\x0bc\r".encode(), b"d"]


def test_a_line_that_would_fill_the_memory_ends_the_reading_after_the_lines_before() -> None:
    lines = split_lines([b"one\n", b"x" * 600, b"x" * 600, b"\n"], longest=1000)
    assert next(lines) == b"one"
    with pytest.raises(LineTooLong, match=r"check dataset\.fileFormat"):
        next(lines)
