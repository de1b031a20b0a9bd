"""Rows of a JSON Lines file as chats. Pure.

A row is one of three things:
1. *invalid*: no JSON object, a column is missing, a text is no text, a role is unknown. The task fails and
names the line, because such a row is a mistake that nobody can train around. 2. *dropped*: well-formed, but
without anything to learn; counted by rule (``Drop``). 3. a ``Chat``: turns that end with an answer. Turns
after the last answer teach nothing and are cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from mlora_worker.data.errors import DataError
from mlora_worker.protocol import DatasetFields, DatasetFormat, FailureReason

MOST_ERRORS = 10  # of a file that are listed
_LONGEST_FLAW = 200  # characters: a column's name may be as long as the row
_BOM = b"\xef\xbb\xbf"

ASSISTANT = "assistant"
_ROLES = ("system", "user", ASSISTANT)
_TOOL_ROLES = ("tool", "function")


class Drop(StrEnum):
    """Why a well-formed row is not used; the names that ``status.data.dropped`` counts."""

    NO_ANSWER = "NoAnswer"  # no assistant turn, or one that is null, empty or blank
    TOOL_CALLS = "ToolCalls"  # has tool calls, tool results or tool definitions, which are not supported
    TEMPLATE_MISMATCH = "TemplateMismatch"  # the chat template does not show which tokens are the answer
    TOO_LONG = "TooLong"  # longer than maxSeqLength, with overlong: skip
    NO_SUPERVISED_TOKENS = "NoSupervisedTokens"  # truncation cut the whole answer off


class Turn(NamedTuple):
    role: str  # system, user or assistant
    content: str


@dataclass(frozen=True)
class Chat:
    line: int  # 1-based
    turns: tuple[Turn, ...]  # the last is an assistant's


@dataclass(frozen=True)
class Dropped:
    line: int
    rule: Drop


class _Invalid(Exception):
    """What is wrong with one row."""


def read_rows(
    lines: Iterable[bytes], format: DatasetFormat, fields: DatasetFields, source: str
) -> Iterator[Chat | Dropped]:
    """Rows in the file's order; blank lines are no rows. ``source`` is how messages name the file.

    Raises DataError (InvalidRow) that lists the first invalid rows: at the end, or once there are
    ``MOST_ERRORS``.
    """
    flaws: list[str] = []
    for number, line in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        try:
            row = _object_of(line)
            if format is DatasetFormat.MESSAGES:
                turns = _turns_of_messages(row, fields.messages)
            else:
                turns = _turns_of_pair(row, fields.prompt, fields.completion)
        except _Invalid as flaw:
            flaws.append(f"line {number}: {str(flaw)[:_LONGEST_FLAW]}")
            if len(flaws) == MOST_ERRORS:
                break
            continue
        if not flaws:  # the task fails anyway: only look for more invalid rows
            yield Dropped(number, turns) if isinstance(turns, Drop) else Chat(number, turns)
    if flaws:
        more = " (and perhaps more)" if len(flaws) == MOST_ERRORS else ""
        raise DataError(FailureReason.INVALID_ROW, f"{source} has invalid rows{more}: " + "; ".join(flaws))


def _object_of(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _Invalid(f"not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise _Invalid(
            f"not JSON ({error.msg} at column {error.colno}); write one JSON object a line"
        ) from None
    except (ValueError, RecursionError):  # absurdly long numbers, absurdly deep nesting
        raise _Invalid("not JSON that can be read") from None
    if not isinstance(row, dict):
        raise _Invalid(f"is {_kind(row)}, not an object; write one JSON object a line")
    return row


def _turns_of_pair(row: dict[str, Any], prompt: str, completion: str) -> tuple[Turn, ...] | Drop:
    question = _text(_column(row, prompt, "prompt"), f"column {prompt!r}")
    answer = _column(row, completion, "completion")
    if answer is None:
        return Drop.NO_ANSWER
    answer = _text(answer, f"column {completion!r}")
    if not answer.strip():
        return Drop.NO_ANSWER
    return Turn("user", question), Turn(ASSISTANT, answer)


def _turns_of_messages(row: dict[str, Any], column: str) -> tuple[Turn, ...] | Drop:
    """Rules, in this order: 1. a malformed turn is invalid; 2. tools anywhere drop the row; 3. an assistant
    turn without text drops it, wherever it stands; 4. what comes after the last answer is cut.
    """
    messages = _column(row, column, "messages")
    if not isinstance(messages, list):
        raise _Invalid(f"column {column!r} is {_kind(messages)}, not a list of turns")
    has_tools = bool(row.get("tools"))
    turns: list[Turn] = []
    blank = False
    for number, message in enumerate(messages, start=1):
        where = f"turn {number}"
        if not isinstance(message, dict):
            raise _Invalid(f"{where} is {_kind(message)}, not an object with role and content")
        role, content = message.get("role"), message.get("content")
        if role in _TOOL_ROLES or message.get("tool_calls") or message.get("function_call"):
            has_tools = True
            continue
        if role not in _ROLES:
            raise _Invalid(f"{where} has role {json.dumps(role)[:40]}; known are {', '.join(_ROLES)}")
        if role == ASSISTANT and content is None:
            blank = True
            continue
        turns.append(Turn(role, _text(content, f"content of {where}")))
        blank |= role == ASSISTANT and not turns[-1].content.strip()
    if has_tools:
        return Drop.TOOL_CALLS
    while turns and turns[-1].role != ASSISTANT:
        turns.pop()
    return Drop.NO_ANSWER if blank or not turns else tuple(turns)


def _column(row: dict[str, Any], name: str, field: str) -> Any:
    if name not in row:
        found = ", ".join(map(repr, sorted(row)[:10])) or "none"
        raise _Invalid(
            f"has no column {name!r}; it has {found}; name the right one in dataset.fields.{field}"
        )
    return row[name]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _Invalid(f"{what} is {_kind(value)}, not text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise _Invalid(f"{what} has half a surrogate pair, which is no character") from None
    return value


def _kind(value: Any) -> str:
    """A JSON value's kind in a user's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "an object"
