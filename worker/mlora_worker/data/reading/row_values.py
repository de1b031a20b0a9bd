"""Values of a row: columns, texts and turns, or what is wrong with them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlora_worker.data.reading.media import media_of_content
from mlora_worker.data.reading.row_types import ASSISTANT, SYSTEM, TOOL, USER, Drop, Turn
from mlora_worker.data.reading.tool_turns import Fields, Malformed, call_of_text, fields_of, result_fields

ROLES = {SYSTEM: SYSTEM, USER: USER, ASSISTANT: ASSISTANT, TOOL: TOOL, "function": TOOL}
_CALL = "function_call"  # an answer whose text is the JSON of a call
SHAREGPT_ROLES = {
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "model": ASSISTANT,
    "system": SYSTEM,
    _CALL: ASSISTANT,
    "observation": TOOL,
    "tool": TOOL,
    "function": TOOL,
}
_OPENAI_ROLES_SHOWN = (SYSTEM, USER, ASSISTANT, TOOL)

Turns = tuple[Turn, ...]
Row = Mapping[str, Any]


class InvalidValue(Exception):
    """What is wrong with one row."""


def column_of(row: Row, name: str, field: str) -> Any:
    if name not in row:
        found = ", ".join(map(repr, sorted(row)[:10])) or "none"
        raise InvalidValue(
            f"has no column {name!r}; it has {found}; name the right one in dataset.fields.{field}"
        )
    return row[name]


def text_of(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidValue(f"{what} is {kind_of(value)}, not text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidValue(f"{what} has half a surrogate pair, which is not a character") from None
    return value


def kind_of(value: Any) -> str:
    """A value's kind in a user's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else type(value).__name__


def answer_of(row: Row, name: str, field: str) -> str | None:
    """None where there is none to learn."""
    value = column_of(row, name, field)
    if value is None:
        return None
    answer = text_of(value, f"column {name!r}")
    return answer if answer.strip() else None


def optional_text(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    text = text_of(value, f"column {name!r}")
    return text if text.strip() else ""


def list_of_turns(row: Row, column: str, field: str) -> list[Any]:
    messages = column_of(row, column, field)
    if not isinstance(messages, list):
        raise InvalidValue(f"column {column!r} is {kind_of(messages)}, not a list of turns")
    return messages


def turns_of(messages: list[Any], role_key: str, content_key: str, roles: Mapping[str, str]) -> Turns | Drop:
    """Rules, in this order: 1. a malformed turn is invalid; 2. an assistant turn without text and without a call drops the
    row, wherever it stands; 3. what comes after the last answer that is learnt is cut.
    """
    turns: list[Turn] = []
    blank = weightless = False
    for number, message in enumerate(messages, start=1):
        where = f"turn {number}"
        if not isinstance(message, dict):
            raise InvalidValue(
                f"{where} is {kind_of(message)}, not an object with {role_key} and {content_key}"
            )
        given = message.get(role_key)
        role = roles.get(given) if isinstance(given, str) else None
        if role is None:
            shown = json.dumps(given)[:40]
            raise InvalidValue(f"{where} has {role_key} {shown}; valid are {', '.join(_shown(roles))}")
        turn = _turn(
            message, role, message.get(content_key), f"{content_key} of {where}", where, given == _CALL
        )
        weightless |= not turn.learnt
        turns.append(turn)
        blank |= role == ASSISTANT and not turn.content.strip() and not turn.calls
    while turns and not (turns[-1].role == ASSISTANT and turns[-1].learnt):
        turns.pop()
    if blank or not turns:
        return Drop.NO_ANSWER if blank or not weightless else Drop.ZERO_WEIGHT
    return tuple(turns)


def _turn(message: Mapping[str, Any], role: str, content: Any, what: str, where: str, is_call: bool) -> Turn:
    """``is_call``: the content is the JSON text of a call."""
    media = media_of_content(content)
    if media is not None:
        raise InvalidValue(f"{what} {media}")
    beside: Fields | None = None
    try:
        if is_call:
            beside, content = call_of_text(text_of(content, what)), ""
        elif role == ASSISTANT:
            beside = fields_of(message)
        elif role == TOOL:
            beside = result_fields(message)
    except Malformed as flaw:
        raise InvalidValue(f"{where}: {flaw}") from None
    learnt = role != ASSISTANT or _is_learnt(message.get("weight"), where)
    if content is None and role in (ASSISTANT, TOOL):
        content = ""
    return Turn(role, text_of(content, what), learnt, beside)


def _shown(roles: Mapping[str, str]) -> tuple[str, ...]:
    return _OPENAI_ROLES_SHOWN if roles is ROLES else tuple(roles)


def _is_learnt(weight: Any, where: str) -> bool:
    """``weight`` is that of an answer: 0 or 1, as OpenAI's fine-tuning has it."""
    if weight not in (None, 0, 1):
        raise InvalidValue(
            f"{where} has weight {json.dumps(weight, default=str)[:40]}; that of a turn is 0 or 1"
        )
    return weight is None or bool(weight)
