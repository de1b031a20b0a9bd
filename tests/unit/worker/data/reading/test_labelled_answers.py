"""Rows with one answer and a label, and tools in rows of preferences."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlora_worker.data.errors import DataError
from mlora_worker.data.reading.records import json_lines
from mlora_worker.data.reading.row_formats import read_rows
from mlora_worker.data.reading.row_types import Drop, Dropped
from mlora_worker.protocol import DatasetFields, DatasetFormat

ANSWER, PAIR = DatasetFormat.UNPAIRED_PREFERENCE, DatasetFormat.PREFERENCE
TOOL = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "rain", "arguments": {"city": "Bern"}}}


def read(*rows: dict[str, Any], format: DatasetFormat = ANSWER, **fields: str) -> list[Any]:
    records = json_lines(json.dumps(row).encode() + b"\n" for row in rows)
    return list(read_rows(records, format, DatasetFields.model_validate(fields), "rows.jsonl"))


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASKED, SAID = turn("user", "Rain?"), turn("assistant", "No.")
CALLS = turn("assistant", "", tool_calls=[CALL])
RESULT = turn("tool", "4 mm", name="rain")


@pytest.mark.parametrize(
    ("label", "desirable"), [(True, True), (False, False), ("True", True), ("false", False)]
)
def test_a_label_is_a_boolean_or_its_word(label: Any, desirable: bool) -> None:
    (found,) = read({"prompt": "2+2 is", "completion": " 4", "label": label})
    assert (found.desirable, found.chat.plain) == (desirable, True)
    assert [turn.content for turn in found.chat.turns] == ["2+2 is", " 4"]


@pytest.mark.parametrize(
    ("label", "kind"), [("spam", "text"), (1, "a number"), (None, "null"), ([True], "a list"), ("", "text")]
)
def test_what_is_no_label_is_named(label: Any, kind: str) -> None:
    with pytest.raises(DataError, match=f"line 1: column 'label' is {kind}, not true or false"):
        read({"prompt": "a", "completion": "b", "label": label})


def test_turns_have_their_prompt_as_context() -> None:
    (found,) = read({"prompt": [ASKED, SAID, ASKED], "completion": [SAID], "label": False})
    assert [turn.learnt for turn in found.chat.turns] == [True, False, True, True]
    assert found.chat.plain is False


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "has no column 'label'"),
        ({"prompt": "a", "completion": [SAID], "label": True}, "column 'prompt' is text, and 'completion' a list of turns"),
        ({"prompt": [ASKED], "completion": "b", "label": True}, "must be all texts, or all turns; change 'completion'"),
        ({"prompt": [ASKED], "completion": [ASKED, SAID], "label": True}, "begins with a turn of user"),
        ({"prompt": None, "completion": "b", "label": True}, "column 'prompt' is null, not text"),
    ],
)  # fmt: skip
def test_what_is_no_answer_to_a_prompt_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(row)


@pytest.mark.parametrize("completion", ["", None, [], [turn("assistant", " ")]])
def test_a_row_without_an_answer_is_dropped(completion: Any) -> None:
    prompt = [ASKED] if isinstance(completion, list) else "a"
    (found,) = read({"prompt": prompt, "completion": completion, "label": True})
    assert found == Dropped(1, Drop.NO_ANSWER)


def test_columns_may_have_other_names() -> None:
    (found,) = read(
        {"q": "a", "a": "b", "good": True, "w": 2}, prompt="q", completion="a", label="good", weight="w"
    )
    assert (found.desirable, found.weight, found.chat.weight) == (True, 2.0, 2.0)


def test_tools_and_their_calls_are_kept_of_pairs_and_of_answers() -> None:
    row = {"prompt": [ASKED], "tools": [TOOL]}
    (pair,) = read(row | {"chosen": [CALLS, RESULT, SAID], "rejected": [SAID]}, format=PAIR)
    (answer,) = read(row | {"completion": [CALLS], "label": True})
    for chat in (pair.chosen, pair.rejected, answer.chat):
        assert [one["function"]["name"] for one in chat.tools] == ["rain"]
    assert [turn.role for turn in pair.chosen.turns] == ["user", "assistant", "tool", "assistant"]
    assert answer.chat.turns[1].calls[0]["function"]["arguments"] == {"city": "Bern"}


def test_calls_and_thoughts_in_a_prompt_are_context() -> None:
    (found,) = read({"prompt": [ASKED, CALLS, RESULT], "completion": [SAID], "label": True, "tools": [TOOL]})
    assert [turn.learnt for turn in found.chat.turns] == [True, False, True, True]
    (pair,) = read(
        {"prompt": [ASKED], "chosen": [SAID | {"reasoning_content": "Look."}], "rejected": [SAID]},
        format=PAIR,
    )
    assert pair.chosen.turns[1].fields is not None
    assert pair.rejected.turns[1].fields is None
