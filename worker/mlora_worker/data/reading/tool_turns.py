"""What rows hold beside the text of turns: tool calls, tool definitions, thoughts. As chat templates read them. Pure.

Calls have OpenAI's form: ``{"type": "function", "function": {"name": ..., "arguments": {...}}}``. Arguments that are JSON
text are read, as servers do it before they render a request. A file of columns gives every object the keys of all, so
a value that is null is no value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

TOOL_COLUMNS: Final = ("tools", "functions")  # the second is an older name
# What serving engines and templates call an answer's thoughts when they stand beside it.
REASONING: Final = ("reasoning_content", "reasoning", "thinking")

Fields = dict[str, Any]


class Malformed(ValueError):
    """``str(error)`` says what is wrong, without where."""


def tools_of(row: Mapping[str, Any]) -> tuple[Fields, ...]:
    """Definitions, in a list or as the JSON text of one. Raises Malformed."""
    for column in TOOL_COLUMNS:
        value = row.get(column)
        if isinstance(value, str):
            value = _read(value, f"column {column!r}") if value.strip() else None
        if not value:
            continue
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise Malformed(f"column {column!r} is not a list of tool definitions")
        found = [_without_null(one) for one in value]
        if column == "functions":
            found = [one if "function" in one else {"type": "function", "function": one} for one in found]
        return tuple(found)
    return ()


def fields_of(message: Mapping[str, Any]) -> Fields | None:
    """What an assistant's turn has beside its content: ``tool_calls``, and its thoughts under every name that templates
    have for them. None where there is nothing. Raises Malformed."""
    calls = message.get("tool_calls")
    if not calls and message.get("function_call"):
        calls = [message["function_call"]]
    found: Fields = {}
    if calls:
        if not isinstance(calls, list):
            raise Malformed("has tool_calls that are not a list")
        found["tool_calls"] = [_call(one) for one in calls]
    thoughts = next((message[name] for name in REASONING if message.get(name)), None)
    if thoughts is not None:
        if not isinstance(thoughts, str):
            raise Malformed("has thoughts that are not text")
        if thoughts.strip():
            found |= dict.fromkeys(REASONING, thoughts)
    return found or None


def result_fields(message: Mapping[str, Any]) -> Fields | None:
    """What the turn of a tool has beside its content: which tool it is, and which call."""
    found = {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}
    return found or None


def call_of_text(text: str) -> Fields:
    """Calls that are written as the JSON text of a turn, as ShareGPT's ``function_call``. Raises Malformed."""
    value = _read(text, "the call")
    return {"tool_calls": [_call(one) for one in (value if isinstance(value, list) else [value])]}


def texts_in(value: Any) -> Iterator[str]:
    """All texts within, names of objects among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield str(key)
            yield from texts_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_in(one)


def _call(value: Any) -> Fields:
    if not isinstance(value, dict):
        raise Malformed("has a tool call that is not an object")
    inner = value.get("function")
    function = inner if isinstance(inner, dict) else value
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name.strip():
        raise Malformed("has a tool call without a name")
    if isinstance(arguments, str):
        arguments = _read(arguments, f"the arguments of {name[:40]}") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Malformed(f"has a call of {name[:40]} whose arguments are not an object")
    made: Fields = {"type": "function", "function": {"name": name, "arguments": _without_null(arguments)}}
    if isinstance(value.get("id"), str):
        made["id"] = value["id"]
    return made


def _read(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed(f"{what} is text that is not JSON") from None


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _without_null(one) for name, one in value.items() if one is not None}
    return [_without_null(one) for one in value] if isinstance(value, list) else value
