"""The keys of the first rows tell the format, by one table; what they do not tell is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_worker.protocol import (
    ROW_SHAPES,
    DatasetFields,
    DatasetFormat,
    FormatNotDetected,
    NamedFormat,
    detected_format,
)

TURN, SHARED = {"role": "user", "content": "2+2?"}, {"from": "human", "value": "2+2?"}


def refusal(
    *rows: dict[str, Any], fields: DatasetFields | None = None, text: bool = True
) -> FormatNotDetected:
    with pytest.raises(FormatNotDetected) as caught:
        detected_format(rows, fields, text=text)
    return caught.value


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"prompt": "a", "completion": "b"}, DatasetFormat.PROMPT_COMPLETION),
        ({"prompt": "a", "completion": None}, DatasetFormat.PROMPT_COMPLETION),
        ({"id": 7, "prompt": "a", "completion": "b", "text": "ab"}, DatasetFormat.PROMPT_COMPLETION),
        ({"messages": [TURN]}, DatasetFormat.MESSAGES),
        ({"messages": []}, DatasetFormat.MESSAGES),
        ({"prompt": "a", "prompt_id": "x", "messages": [TURN]}, DatasetFormat.MESSAGES),
        ({"messages": [TURN | {"from": None}]}, DatasetFormat.MESSAGES),
        ({"conversations": [SHARED], "system": "s"}, DatasetFormat.SHAREGPT),
        ({"instruction": "a", "input": "", "output": "b", "text": "all"}, DatasetFormat.ALPACA),
        ({"instruction": "a", "output": "b"}, DatasetFormat.ALPACA),
        ({"text": "a", "url": "u"}, DatasetFormat.TEXT),
        ({"prompt": "a", "completion": "b", "label": True}, DatasetFormat.UNPAIRED_PREFERENCE),
        ({"prompt": "a", "completion": "b", "label": "False"}, DatasetFormat.UNPAIRED_PREFERENCE),
        ({"prompt": [TURN], "completion": [TURN], "label": False}, DatasetFormat.UNPAIRED_PREFERENCE),
        ({"prompt": "a", "completion": "b", "label": "spam"}, DatasetFormat.PROMPT_COMPLETION),
        ({"prompt": "a", "completion": "b", "label": 1}, DatasetFormat.PROMPT_COMPLETION),
    ],
)
def test_the_keys_of_a_row_tell_its_format(row: dict[str, Any], format: DatasetFormat) -> None:
    assert detected_format([row, row]) is format


def test_each_format_is_in_the_table_once() -> None:
    assert sorted(shape.format for shape in ROW_SHAPES) == sorted(DatasetFormat)
    named = {column for shape in ROW_SHAPES for column in shape.columns}
    assert named == set(DatasetFields.model_fields) - {"weight"}


@pytest.mark.parametrize("shape", ROW_SHAPES, ids=lambda shape: shape.format.value)
def test_renamed_columns_are_looked_for_under_their_new_names(shape: Any) -> None:
    fields = DatasetFields.model_validate({name: f"my_{name}" for name in shape.columns})
    row = {f"my_{name}": "a" for name in shape.required}
    assert detected_format([row], fields) is shape.format
    assert "keys 'a'" in str(refusal({"a": 1}, fields=fields))


def test_a_renamed_column_leaves_only_the_formats_that_have_it() -> None:
    row = {"prompt": "a", "completion": "b", "messages": [TURN]}
    assert str(refusal(row)).startswith("the rows may be promptCompletion or messages: they have the keys")
    talk = DatasetFields(messages="talk")
    assert detected_format([row | {"talk": [TURN]}], talk) is DatasetFormat.MESSAGES
    assert "of several formats (prompt, text)" in str(
        refusal(row, fields=DatasetFields(prompt="a", text="b"))
    )


@pytest.mark.parametrize(
    ("row", "suggestion"),
    [
        ({"question": "a", "answer": "b"}, {"prompt": "question", "completion": "answer"}),
        ({"text": "all", "question": "a", "answer": "b"}, {"prompt": "question", "completion": "answer"}),
        ({"conversations": [TURN]}, {"messages": "conversations"}),
        ({"messages": [SHARED]}, {"conversations": "messages"}),
        ({"text": "a", "chat": [TURN]}, {"messages": "chat"}),
        ({"body": "a"}, {"text": "body"}),
    ],
)
def test_columns_with_other_names_are_suggested_and_never_taken(
    row: dict[str, Any], suggestion: dict[str, str]
) -> None:
    error = refusal(row)
    assert isinstance(error.suggestion, NamedFormat)
    assert error.suggestion.fields == suggestion
    assert f"In dataset, write {error.suggestion}" in str(error)
    # What is suggested is taken once it is written.
    assert detected_format([row], DatasetFields.model_validate(suggestion)) is error.suggestion.format


def test_what_is_found_and_what_is_known_is_said() -> None:
    said = str(refusal({"a": 1, "c": 2}))
    assert "they have the keys 'a', 'c'" in said
    assert all(shape.format.value in said for shape in ROW_SHAPES)
    assert "set dataset.format and dataset.fields" in said
    said = str(refusal({"a": 1}, {"b": 1}))
    assert "no key in common (row 1 has 'a', row 2 has 'b')" in said
    many = str(refusal({f"{number}" * 100: 1 for number in range(9)} | {f"k{n}": 1 for n in range(90)}))
    assert "and 89 more" in many
    assert len(many) < 1000


def test_a_key_that_some_row_lacks_tells_nothing() -> None:
    full, poor = {"prompt": "a", "completion": "b"}, {"prompt": "a"}
    said = "row 1 has the keys 'prompt', 'completion' and row 3 has the keys 'prompt'. All rows of a task need one format"
    assert said in str(refusal(full, full, poor))


def test_rows_of_several_formats_are_told_which_differ() -> None:
    answer, pair = {"prompt": "a", "completion": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}
    error = refusal(answer, answer, pair, answer)
    assert (
        "row 1 has the keys 'prompt', 'completion' and row 3 has the keys 'prompt', 'chosen', 'rejected'"
        in str(error)
    )
    assert "set dataset.format" not in str(error)
    assert "row 1 has the keys 'text' and row 2 has the keys 'messages'" in str(
        refusal({"text": "a"}, {"messages": [TURN]})
    )
    asked = {"question": "a", "answer": "b"}
    assert refusal(asked, asked | {"text": "all"}).suggestion is not None, (
        "a column too many is no other format"
    )


def test_text_is_left_out_where_a_task_chooses_answers_or_a_template() -> None:
    error = refusal({"text": "a"}, text=False)
    assert "text takes neither trainOn nor a chat template" in str(error)
    assert error.suggestion is None
