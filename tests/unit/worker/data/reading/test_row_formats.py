from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.data.errors import DataError
from mlora_worker.data.reading.records import json_lines
from mlora_worker.data.reading.row_formats import columns_of, read_rows
from mlora_worker.data.reading.row_types import Chat, Drop, Dropped, PlainText, Turn
from mlora_worker.protocol import DatasetFields, DatasetFormat, FailureReason

PAIR, MESSAGES = DatasetFormat.PROMPT_COMPLETION, DatasetFormat.MESSAGES
DEFAULT = DatasetFields()
GSM8K = DatasetFields(prompt="question", completion="answer")


def rows(
    lines: list[bytes], format: DatasetFormat = PAIR, fields: DatasetFields = DEFAULT
) -> list[Chat | PlainText | Dropped]:
    records = json_lines(line + b"\n" for line in lines)
    return list(read_rows(records, format, fields, "s3://bucket/rows.jsonl"))


def chat(*turns: object) -> list[Chat | PlainText | Dropped]:
    return rows([json.dumps({"messages": list(turns)}).encode()], MESSAGES)


def user(content: object = "hi") -> dict[str, object]:
    return {"role": "user", "content": content}


def assistant(content: object = "hello", **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **more}


def failure(lines: list[bytes], format: DatasetFormat = PAIR, fields: DatasetFields = DEFAULT) -> str:
    with pytest.raises(DataError) as caught:
        rows(lines, format, fields)
    assert caught.value.reason is FailureReason.INVALID_ROW
    return str(caught.value)


def test_prompt_and_completion_become_a_user_turn_and_an_answer() -> None:
    found = rows([b'{"question": "2+2?", "answer": "4", "id": 7}'], fields=GSM8K)
    assert found == [Chat(1, (Turn("user", "2+2?"), Turn("assistant", "4")))]


def test_byte_order_mark_crlf_and_blank_lines_are_no_rows_but_count_as_lines() -> None:
    lines = [
        b'\xef\xbb\xbf{"prompt": "a", "completion": "b"}\r',
        b"",
        b"  \r",
        b'{"prompt": "c", "completion": "d"}\r',
    ]
    assert [(row.line, row.turns[1].content) for row in rows(lines) if isinstance(row, Chat)] == [
        (1, "b"),
        (4, "d"),
    ]


def test_turns_after_the_last_answer_are_cut() -> None:
    assert chat(user(), assistant(), user("and?")) == [
        Chat(1, (Turn("user", "hi"), Turn("assistant", "hello")))
    ]


def test_every_turn_of_a_conversation_is_kept_in_order() -> None:
    (row,) = chat({"role": "system", "content": "Be kind."}, user(), assistant(), user("2?"), assistant("4"))
    assert isinstance(row, Chat)
    assert [turn.role for turn in row.turns] == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("turns", "rule"),
    [
        pytest.param([user(), assistant("")], Drop.NO_ANSWER, id="empty answer"),
        pytest.param([user(), assistant(" \n")], Drop.NO_ANSWER, id="blank answer"),
        pytest.param([user(), assistant(None)], Drop.NO_ANSWER, id="null answer"),
        pytest.param([user(), {"role": "assistant"}], Drop.NO_ANSWER, id="answer without content"),
        pytest.param([user()], Drop.NO_ANSWER, id="no answer"),
        pytest.param([], Drop.NO_ANSWER, id="no turns"),
        pytest.param(
            [user(), assistant(""), user(), assistant("x")], Drop.NO_ANSWER, id="one of two answers empty"
        ),
    ],
)
def test_rows_without_a_trainable_answer_are_dropped_by_rule(turns: list[object], rule: Drop) -> None:
    assert chat(*turns) == [Dropped(1, rule)]


@pytest.mark.parametrize("name", ["tools", "functions"])
@pytest.mark.parametrize(
    ("value", "defined"),
    [("[]", 0), (" ", 0), ("null", 0), ([], 0), (None, 0), ('[{"name": "f"}]', 1), ([{"name": "f"}], 1)],
)
def test_tools_are_defined_by_either_name_in_a_list_or_its_json_text(
    name: str, value: object, defined: int
) -> None:
    found = one(MESSAGES, messages=[user(), assistant()], **{name: value})
    assert isinstance(found, Chat)
    assert len(found.tools) == defined
    assert name in columns_of(MESSAGES, DEFAULT)


def test_a_call_has_one_form_however_it_is_written() -> None:
    arguments = {"city": "Bern"}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    ways: list[dict[str, object]] = [
        {"tool_calls": [call]},
        {"tool_calls": [{"name": "f", "arguments": {"city": "Bern", "unit": None}}]},
        {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}]},
        {"function_call": {"name": "f", "arguments": json.dumps(arguments)}},
    ]
    for way in ways:
        (row,) = chat(user(), assistant(None, **way))
        assert row == Chat(1, (Turn("user", "hi"), Turn("assistant", "", fields={"tool_calls": [call]})))
    shared = one(
        DatasetFormat.SHAREGPT,
        conversations=[
            QUESTION,
            {"from": "function_call", "value": json.dumps({"name": "f", "arguments": arguments})},
            {"from": "observation", "value": "4 mm"},
            ANSWER,
        ],
        tools='[{"name": "f"}]',
    )
    assert isinstance(shared, Chat)
    assert [turn.role for turn in shared.turns] == ["user", "assistant", "tool", "assistant"]
    assert shared.turns[1].calls == [call]
    assert shared.tools == ({"name": "f"},)


def test_thoughts_have_every_name_that_templates_read() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        (row,) = chat(user(), assistant("4", **{name: "2+2"}))
        assert isinstance(row, Chat)
        assert row.turns[-1].fields == {"reasoning_content": "2+2", "reasoning": "2+2", "thinking": "2+2"}
    assert chat(user(), assistant("4", reasoning_content=" ", tool_calls=[])) == chat(user(), assistant("4"))


def test_a_result_names_its_tool_and_its_call_and_may_be_empty() -> None:
    result = {"role": "tool", "name": "f", "tool_call_id": "c1", "content": None}
    (row,) = chat(user(), assistant(None, tool_calls=[{"name": "f"}]), result, assistant())
    assert isinstance(row, Chat)
    assert row.turns[2] == Turn("tool", "", fields={"name": "f", "tool_call_id": "c1"})


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        ({"tool_calls": [{}]}, "turn 2: has a tool call without a name"),
        ({"tool_calls": "f()"}, "turn 2: has tool_calls that are not a list"),
        ({"tool_calls": [{"name": "f", "arguments": "{"}]}, "the arguments of f is text that is not JSON"),
        ({"tool_calls": [{"name": "f", "arguments": [1]}]}, "whose arguments are not an object"),
        ({"reasoning_content": 3}, "turn 2: has thoughts that are not text"),
    ],
)
def test_what_is_no_call_is_an_invalid_row(turn: dict[str, object], told: str) -> None:
    line = json.dumps({"messages": [user(), assistant("x", **turn)]}).encode()
    assert told in failure([line], MESSAGES)
    tools = json.dumps({"messages": [user(), assistant()], "tools": {"f": 1}}).encode()
    assert "column 'tools' is not a list of tool definitions" in failure([tools], MESSAGES)


def test_an_answer_of_weight_0_is_context_and_is_not_learnt() -> None:
    early = Turn("assistant", "hello", learnt=False)
    whole = [
        user(),
        assistant(weight=0),
        user(),
        assistant("yes", weight=1),
        user(),
        assistant("no", weight=0),
    ]
    assert chat(*whole) == [
        Chat(1, (Turn("user", "hi"), early, Turn("user", "hi"), Turn("assistant", "yes")))
    ]
    assert chat(user(), assistant(weight=0), user()) == [Dropped(1, Drop.ZERO_WEIGHT)]
    assert chat(user(), assistant(weight=None)) == [Chat(1, (Turn("user", "hi"), Turn("assistant", "hello")))]


@pytest.mark.parametrize("answer", ["null", '""', '" "'])
def test_an_empty_completion_is_dropped(answer: str) -> None:
    assert rows([b'{"prompt": "a", "completion": ' + answer.encode() + b"}"]) == [Dropped(1, Drop.NO_ANSWER)]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"prompt": "a"', "not JSON (Expecting ',' delimiter at column 15)"),
        (b'["a", "b"]', "is a list, not an object"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 13"),
        (b'{"prompt": "a", "output": "b"}', "no column 'completion'; it has 'output', 'prompt'"),
        (b'{"prompt": "a", "completion": 42}', "column 'completion' is a number, not text"),
        (b'{"prompt": null, "completion": "b"}', "column 'prompt' is null, not text"),
        (b'{"prompt": "a", "completion": "\\ud800"}', "half a surrogate pair"),
        (b"[" * 100_000, "nests lists and objects too deeply"),
    ],
)
def test_an_invalid_row_names_the_file_the_line_and_the_flaw(line: bytes, told: str) -> None:
    message = failure([b'{"prompt": "a", "completion": "b"}', b"", line])
    assert message.startswith("s3://bucket/rows.jsonl has invalid rows: line 3: ")
    assert told in message


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        ("hi", "column 'messages' is text, not a list of turns"),
        (["hi"], "turn 1 is text, not an object"),
        (
            [{"role": "narrator", "content": "x"}],
            'turn 1 has role "narrator"; valid are system, user, assistant',
        ),
        ([user(None), assistant()], "content of turn 1 is null, not text"),
        ([user([{"type": "text", "text": "hi"}]), assistant()], "content of turn 1 is a list, not text"),
        (
            [user([{"type": "text", "text": "hi"}, {"type": "image", "image": "a.png"}]), assistant()],
            "content of turn 1 has a part of type image, and rows are text alone: remove the row",
        ),
        ([user(), assistant([{"type": "input_audio"}])], "content of turn 2 has a part of type input_audio"),
        ([user([{"type": "video_url"}]), assistant()], "content of turn 1 has a part of type video_url"),
        ([user(), assistant(3)], "content of turn 2 is a number, not text"),
        ([user(), assistant("x", weight=0.5)], "turn 2 has weight 0.5; that of a turn is 0 or 1"),
    ],
)
def test_an_invalid_turn_is_named(turns: object, told: str) -> None:
    assert told in failure([json.dumps({"messages": turns}).encode()], MESSAGES)


@pytest.mark.parametrize("column", ["images", "videos", "audios"])
def test_a_conversation_with_pictures_beside_it_is_refused_by_the_column(column: str) -> None:
    row = {"messages": [user("<image>What is it?"), assistant()], column: ["a.png"]}
    told = failure([json.dumps(row).encode()], MESSAGES)
    assert f"has a column '{column}', and rows are text alone: remove the row" in told
    assert len(rows([json.dumps(row | {column: []}).encode()], MESSAGES)) == 1


@pytest.mark.parametrize(
    ("format", "row"),
    [
        (DatasetFormat.PROMPT_COMPLETION, {"prompt": "What is it?", "completion": "A cat."}),
        (DatasetFormat.ALPACA, {"instruction": "What is it?", "output": "A cat."}),
        (DatasetFormat.TEXT, {"text": "It is a cat."}),
        (DatasetFormat.PREFERENCE, {"prompt": "What is it?", "chosen": "A cat.", "rejected": "A dog."}),
    ],
)
def test_pictures_beside_a_row_of_any_other_format_are_refused_too(
    format: DatasetFormat, row: dict[str, object]
) -> None:
    assert "has a column 'images'" in failure([json.dumps(row | {"images": ["a.png"]}).encode()], format)
    assert len(rows([json.dumps(row | {"images": []}).encode()], format)) == 1


def test_only_the_first_ten_invalid_rows_are_listed_and_reading_stops_there() -> None:
    read = []

    def lines() -> Iterator[bytes]:
        for number in range(1, 1000):
            read.append(number)
            yield b"{\n"

    with pytest.raises(DataError, match=r"\(and perhaps more\)") as caught:
        list(read_rows(json_lines(lines()), PAIR, DatasetFields(), "rows"))
    assert "line 10:" in str(caught.value)
    assert "line 11:" not in str(caught.value)
    assert len(read) == 10


@given(st.binary(max_size=200))
def test_whatever_the_bytes_are_a_row_is_a_chat_dropped_or_named(line: bytes) -> None:
    try:
        found = rows([line.replace(b"\n", b"")])
    except DataError as error:
        flaw = str(error)
    else:
        flaw = ""
        assert len(found) <= 1
    assert not flaw or "line 1: " in flaw


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "messages", "tool_calls"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(_JSON)
def test_whatever_the_messages_are_no_answer_is_ever_blank(value: object) -> None:
    try:
        found = rows([json.dumps({"messages": value}).encode()], MESSAGES)
    except DataError:
        return
    for row in found:
        assert isinstance(row, Dropped) or all(
            turn.content.strip() or turn.calls for turn in row.turns if turn.role == "assistant"
        )


def one(format: DatasetFormat, fields: DatasetFields = DEFAULT, **row: object) -> Chat | PlainText | Dropped:
    (found,) = rows([json.dumps(row).encode()], format, fields)
    return found


QUESTION, ANSWER = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}


@pytest.mark.parametrize(
    ("format", "row", "expected"),
    [
        pytest.param(
            DatasetFormat.ALPACA,
            {"instruction": "Add.", "input": "2 2", "output": "4"},
            (Turn("user", "Add.\n\n2 2"), Turn("assistant", "4")),
            id="alpaca with an input",
        ),
        pytest.param(
            DatasetFormat.ALPACA,
            {"instruction": "Greet.", "input": " ", "output": "Hi", "system": "Be kind."},
            (Turn("system", "Be kind."), Turn("user", "Greet."), Turn("assistant", "Hi")),
            id="alpaca with a blank input and a system turn",
        ),
        pytest.param(
            DatasetFormat.ALPACA,
            {"instruction": "Greet.", "output": "Hi", "input": None, "history": []},
            (Turn("user", "Greet."), Turn("assistant", "Hi")),
            id="alpaca without an input",
        ),
        pytest.param(
            DatasetFormat.SHAREGPT,
            {"conversations": [QUESTION, ANSWER]},
            (Turn("user", "hi"), Turn("assistant", "hello")),
            id="sharegpt",
        ),
        pytest.param(
            DatasetFormat.SHAREGPT,
            {"conversations": [QUESTION, ANSWER, QUESTION], "system": "Be kind."},
            (Turn("system", "Be kind."), Turn("user", "hi"), Turn("assistant", "hello")),
            id="sharegpt with a system column and a question without answer",
        ),
    ],
)
def test_a_row_of_each_format_becomes_the_same_kind_of_chat(
    format: DatasetFormat, row: dict[str, object], expected: tuple[Turn, ...]
) -> None:
    assert one(format, **row) == Chat(1, expected)


def test_a_text_is_kept_as_it_stands() -> None:
    assert one(DatasetFormat.TEXT, text=" once \n") == PlainText(1, " once \n")
    assert one(DatasetFormat.TEXT, DatasetFields(text="body"), body="x") == PlainText(1, "x")


@pytest.mark.parametrize(
    ("format", "row", "rule"),
    [
        (DatasetFormat.TEXT, {"text": " \n"}, Drop.EMPTY_TEXT),
        (DatasetFormat.TEXT, {"text": None}, Drop.EMPTY_TEXT),
        (DatasetFormat.ALPACA, {"instruction": "x", "output": ""}, Drop.NO_ANSWER),
        (DatasetFormat.ALPACA, {"instruction": "x", "output": None}, Drop.NO_ANSWER),
        (DatasetFormat.SHAREGPT, {"conversations": [QUESTION]}, Drop.NO_ANSWER),
        (
            DatasetFormat.SHAREGPT,
            {"conversations": [QUESTION, {"from": "gpt", "value": None}]},
            Drop.NO_ANSWER,
        ),
        (MESSAGES, {"messages": [user(), assistant(None, thinking="2+2")]}, Drop.NO_ANSWER),
    ],
)
def test_a_row_that_teaches_nothing_is_dropped_by_rule_in_every_format(
    format: DatasetFormat, row: dict[str, object], rule: Drop
) -> None:
    assert one(format, **row) == Dropped(1, rule)


@pytest.mark.parametrize(
    ("format", "row", "told"),
    [
        (DatasetFormat.TEXT, {"body": "x"}, "no column 'text'; it has 'body'"),
        (DatasetFormat.TEXT, {"text": 3}, "column 'text' is a number, not text"),
        (DatasetFormat.ALPACA, {"output": "x"}, "no column 'instruction'"),
        (DatasetFormat.ALPACA, {"instruction": "x", "input": [1], "output": "y"}, "column 'input' is a list"),
        (DatasetFormat.ALPACA, {"instruction": "x", "output": "y", "history": [["a", "b"]]}, "use messages"),
        (DatasetFormat.SHAREGPT, {"messages": []}, "no column 'conversations'"),
        (
            DatasetFormat.SHAREGPT,
            {"conversations": [{"from": "narrator", "value": "x"}]},
            'turn 1 has from "narrator"',
        ),
        (
            DatasetFormat.SHAREGPT,
            {"conversations": [{"from": "system", "value": "a"}, QUESTION, ANSWER], "system": "b"},
            "remove one of them",
        ),
    ],
)
def test_an_invalid_row_of_each_format_is_named(
    format: DatasetFormat, row: dict[str, object], told: str
) -> None:
    assert told in failure([json.dumps(row).encode()], format)
