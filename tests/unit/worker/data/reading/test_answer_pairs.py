"""Rows with a chosen and a rejected answer, as texts or turns, with their prompt or with it in front of both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlora_worker.data.errors import DataError
from mlora_worker.data.reading.answer_pairs import prompt_length
from mlora_worker.data.reading.records import json_lines
from mlora_worker.data.reading.row_formats import read_rows
from mlora_worker.data.reading.row_types import AnswerPair, Drop, Dropped
from mlora_worker.protocol import DatasetFields, DatasetFormat


def read(*rows: dict[str, Any], fields: DatasetFields | None = None) -> list[Any]:
    records = json_lines(json.dumps(row).encode() + b"\n" for row in rows)
    return list(read_rows(records, DatasetFormat.PREFERENCE, fields or DatasetFields(), "rows.jsonl"))


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, RIGHT, WRONG = turn("user", "2+2?"), turn("assistant", "4"), turn("assistant", "5")


def words(pair: AnswerPair) -> list[list[tuple[str, str, bool]]]:
    return [
        [(one.role, one.content, one.learnt) for one in chat.turns] for chat in (pair.chosen, pair.rejected)
    ]


def test_texts_are_a_prompt_and_what_follows_it() -> None:
    (pair,) = read({"prompt": "2+2 is", "chosen": " 4", "rejected": " 5"})
    assert words(pair) == [
        [("user", "2+2 is", True), ("assistant", " 4", True)],
        [("user", "2+2 is", True), ("assistant", " 5", True)],
    ]
    assert pair.chosen.plain is True
    assert pair.rejected.plain is True


def test_a_prompt_that_both_answers_begin_with_is_found() -> None:
    texts, turns = read(
        {"chosen": "The sum is four.", "rejected": "The sum is nine."},
        {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
    )
    assert words(texts)[0] == [("user", "The sum is", True), ("assistant", " four.", True)]
    assert words(turns)[1] == [("user", "2+2?", True), ("assistant", "5", True)]
    assert turns.chosen.plain is False


def test_answers_in_the_prompt_are_context() -> None:
    (pair,) = read({"prompt": [ASKED, WRONG, turn("user", "Sure?")], "chosen": [RIGHT], "rejected": [WRONG]})
    assert [learnt for role, _, learnt in words(pair)[0] if role == "assistant"] == [False, True]


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [("ab", "ac", 1), ("a b", "a c", 1), ("abc", "abc", 2), ("ab", "abc", 1), ("b", "c", 0), ("", "x", 0)],
)
def test_something_is_left_of_each_answer(first: str, second: str, length: int) -> None:
    assert prompt_length(first, second) == length


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": None},
        {"prompt": [ASKED], "chosen": [turn("assistant", " ")], "rejected": [WRONG]},
        {"prompt": [ASKED], "chosen": [], "rejected": [WRONG]},
    ],
)
def test_a_pair_without_one_of_its_answers_is_dropped(row: dict[str, Any]) -> None:
    (dropped,) = read(row)
    assert dropped == Dropped(1, Drop.NO_ANSWER)


def test_weights_and_other_names_of_columns_count() -> None:
    fields = DatasetFields(prompt="q", chosen="good", rejected="bad", weight="w")
    (pair,) = read({"q": "a", "good": "b", "bad": "c", "w": 2}, fields=fields)
    assert pair.weight == 2.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "has no column 'rejected'"),
        (
            {"prompt": "a", "chosen": [RIGHT], "rejected": [WRONG]},
            "column 'prompt' is text, and 'chosen' a list of turns: .* or remove it if both answers begin with it",
        ),
        (
            {"prompt": [ASKED], "chosen": "4", "rejected": "5"},
            "column 'chosen' is text, and 'prompt' a list of turns: prompt and answers must be all texts, or all turns",
        ),
        (
            {"prompt": [ASKED], "chosen": [RIGHT], "rejected": 5},
            "column 'rejected' is a number, and 'prompt' a list",
        ),
        ({"prompt": [ASKED], "chosen": [ASKED, RIGHT], "rejected": [WRONG]}, "begins with a turn of user"),
        (
            {"prompt": "a", "chosen": [RIGHT], "rejected": "b"},
            "column 'prompt' is text, and 'chosen' a list of turns",
        ),
    ],
)
def test_what_is_no_pair_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(row)
