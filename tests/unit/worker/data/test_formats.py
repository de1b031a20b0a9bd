from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.data.errors import DataError
from mlora_worker.data.formats import Chat, Drop, Dropped, Turn, read_rows
from mlora_worker.protocol import DatasetFields, DatasetFormat, FailureReason

PAIR, MESSAGES = DatasetFormat.PROMPT_COMPLETION, DatasetFormat.MESSAGES
DEFAULT = DatasetFields()
GSM8K = DatasetFields(prompt="question", completion="answer")


def rows(
    lines: list[bytes], format: DatasetFormat = PAIR, fields: DatasetFields = DEFAULT
) -> list[Chat | Dropped]:
    return list(read_rows(lines, format, fields, "s3://bucket/rows.jsonl"))


def chat(*turns: object) -> list[Chat | Dropped]:
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
        pytest.param(
            [user(), assistant(None, tool_calls=[{"id": 1}])],
            Drop.TOOL_CALLS,
            id="null answer beside a tool call",
        ),
        pytest.param(
            [user(), assistant("x", tool_calls=[{"id": 1}])], Drop.TOOL_CALLS, id="answer beside a tool call"
        ),
        pytest.param(
            [user(), {"role": "tool", "content": "42"}, assistant()], Drop.TOOL_CALLS, id="tool result"
        ),
    ],
)
def test_rows_without_a_trainable_answer_are_dropped_by_rule(turns: list[object], rule: Drop) -> None:
    assert chat(*turns) == [Dropped(1, rule)]


def test_a_row_that_defines_tools_is_dropped_because_its_prompt_could_not_be_rendered_without_them() -> None:
    line = json.dumps({"messages": [user(), assistant()], "tools": [{"type": "function"}]}).encode()
    assert rows([line], MESSAGES) == [Dropped(1, Drop.TOOL_CALLS)]


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
        (b"[" * 100_000, "not JSON"),
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
            'turn 1 has role "narrator"; known are system, user, assistant',
        ),
        ([user(None), assistant()], "content of turn 1 is null, not text"),
        ([user([{"type": "text", "text": "hi"}]), assistant()], "content of turn 1 is a list, not text"),
        ([user(), assistant(3)], "content of turn 2 is a number, not text"),
    ],
)
def test_an_invalid_turn_is_named(turns: object, told: str) -> None:
    assert told in failure([json.dumps({"messages": turns}).encode()], MESSAGES)


def test_only_the_first_ten_invalid_rows_are_listed_and_reading_stops_there() -> None:
    read = []

    def lines() -> object:
        for number in range(1, 1000):
            read.append(number)
            yield b"{"

    with pytest.raises(DataError, match=r"\(and perhaps more\)") as caught:
        list(read_rows(lines(), PAIR, DatasetFields(), "rows"))  # type: ignore[arg-type]
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
            turn.content.strip() for turn in row.turns if turn.role == "assistant"
        )
