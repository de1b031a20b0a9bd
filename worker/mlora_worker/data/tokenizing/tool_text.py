"""Whether a rendering has what a row holds beside the text of its turns: calls, results, definitions, thoughts. Pure.

A template writes them in its own form, as JSON, as XML or as code, so what is looked for are names and texts, as they are
or as JSON has them. Numbers are looked for as JSON writes them; true, false and null have too many forms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from mlora_worker.data.reading.row_types import TOOL, Turn
from mlora_worker.data.reading.tool_turns import REASONING


class LeftOut(Enum):
    """What of an answer."""

    CALLS = "calls"
    THOUGHTS = "thoughts"
    WORDS = "words"


def left_out(turn: Turn, written: str) -> LeftOut | None:
    """``written``: what the template writes for an answer with calls or thoughts."""
    thoughts = (turn.fields or {}).get(REASONING[0])
    if thoughts is not None and not _shows(written, thoughts):
        return LeftOut.THOUGHTS
    functions = [call["function"] for call in turn.calls]
    if not all(
        _shows(written, one) for each in functions for one in (each["name"], *_parts(each["arguments"]))
    ):
        return LeftOut.CALLS
    return None if _shows(written, turn.content) else LeftOut.WORDS


def leaves_out(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], whole: str) -> bool:
    """Whether the rendering of a conversation lacks a tool, a call of one, or what it has returned."""
    names = [
        one.get("function", one).get("name") for one in tools if isinstance(one.get("function", one), dict)
    ]
    if not all(_shows(whole, name) for name in names if isinstance(name, str)):
        return True
    return not all(_shows(whole, turn.content) for turn in turns if turn.role == TOOL)


def _parts(value: Any) -> Iterator[str]:
    match value:
        case bool() | None:
            return
        case str():
            yield value
        case int() | float():
            yield json.dumps(value)
        case Mapping():
            for name, one in value.items():
                yield name
                yield from _parts(one)
        case list() | tuple():
            for one in value:
                yield from _parts(one)


def _shows(text: str, part: str) -> bool:
    bare = part.strip()
    return (
        bare in text or json.dumps(bare, ensure_ascii=False)[1:-1] in text or json.dumps(bare)[1:-1] in text
    )
