"""Rows of a file as chats or texts. Pure.

A row is one of three things:
1. *invalid*: no JSON object, a column is missing, a text is no text, a role is unknown. The task fails and
names the line, because such a row is a mistake that nobody can train around. 2. *dropped*: well-formed, but
without anything to learn; counted by rule (``Drop``). 3. a ``Chat``: turns that end with an answer, where turns
after the last answer teach nothing and are cut; a ``PlainText``; or a ``AnswerPair`` of two answers to one prompt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from mlora_worker.data.errors import DataError
from mlora_worker.data.reading.answer_pairs import Answers, prompt_length
from mlora_worker.data.reading.media import MEDIA_COLUMNS, media_of_content, media_of_row
from mlora_worker.data.reading.row_types import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    USER,
    AnswerPair,
    Chat,
    Drop,
    Dropped,
    InvalidRow,
    PlainText,
    Record,
    Turn,
)
from mlora_worker.data.reading.tool_turns import (
    TOOL_COLUMNS,
    Fields,
    Malformed,
    call_of_text,
    fields_of,
    result_fields,
    tools_of,
)
from mlora_worker.protocol import SHAPE_OF, DatasetFields, DatasetFormat, FailureReason

MOST_ERRORS = 10  # of a file that are listed
_LONGEST_FLAW = 200  # characters: a column's name may be as long as the row

_ROLES = {SYSTEM: SYSTEM, USER: USER, ASSISTANT: ASSISTANT, TOOL: TOOL, "function": TOOL}
_CALL = "function_call"  # an answer whose text is the JSON of a call
_SHAREGPT_ROLES = {
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


class _Invalid(Exception):
    """What is wrong with one row."""


def read_rows(
    records: Iterable[Record], format: DatasetFormat, fields: DatasetFields, source: str, unit: str = "line"
) -> Iterator[Chat | PlainText | AnswerPair | Dropped]:
    """Rows in the file's order. ``source`` is how messages name the file, ``unit`` what its numbers count.

    Raises DataError (InvalidRow) that lists the first invalid rows: at the end, or once there are
    ``MOST_ERRORS``.
    """
    read = _READERS[format]
    flaws: list[str] = []
    for number, value in records:
        try:
            if isinstance(value, InvalidRow):
                raise _Invalid(value.message)
            media = media_of_row(value)
            if media is not None:
                raise _Invalid(media)
            weight = _weight(value, fields.weight)
            found = read(value, fields)
            tools = tools_of(value) if format in _CONVERSATIONS and isinstance(found, tuple) else ()
        except (_Invalid, Malformed) as flaw:
            flaws.append(f"{unit} {number}: {str(flaw)[:_LONGEST_FLAW]}")
            if len(flaws) == MOST_ERRORS:
                break
            continue
        if flaws:  # the task fails anyway: only look for more invalid rows
            continue
        if isinstance(found, Drop):
            yield Dropped(number, found)
        elif not weight:
            yield Dropped(number, Drop.ZERO_WEIGHT)
        elif isinstance(found, str):
            yield PlainText(number, found, weight)
        elif isinstance(found, Answers):
            yield found.pair(number, weight)
        else:
            yield Chat(number, found, weight, tools=tools)
    if flaws:
        more = " (and perhaps more)" if len(flaws) == MOST_ERRORS else ""
        raise DataError(FailureReason.INVALID_ROW, f"{source} has invalid rows{more}: " + "; ".join(flaws))


def _prompt_completion(row: Row, fields: DatasetFields) -> Turns | Drop:
    question = _text(_column(row, fields.prompt, "prompt"), f"column {fields.prompt!r}")
    answer = _answer(row, fields.completion, "completion")
    return Drop.NO_ANSWER if answer is None else (Turn(USER, question), Turn(ASSISTANT, answer))


def _alpaca(row: Row, fields: DatasetFields) -> Turns | Drop:
    """The user's turn is the instruction and, after an empty line, its input where there is one."""
    if row.get("history"):
        raise _Invalid("has earlier turns in column 'history', which alpaca rows may not; use messages")
    asked = _text(_column(row, fields.instruction, "instruction"), f"column {fields.instruction!r}")
    given = _optional_text(row, fields.input)
    answer = _answer(row, fields.output, "output")
    if answer is None:
        return Drop.NO_ANSWER
    question = f"{asked}\n\n{given}" if given else asked
    return (*_system_turn(row, fields), Turn(USER, question), Turn(ASSISTANT, answer))


def _whole_text(row: Row, fields: DatasetFields) -> str | Drop:
    value = _column(row, fields.text, "text")
    if value is None:
        return Drop.EMPTY_TEXT
    text = _text(value, f"column {fields.text!r}")
    return text if text.strip() else Drop.EMPTY_TEXT


def _messages(row: Row, fields: DatasetFields) -> Turns | Drop:
    messages = _list_of_turns(row, fields.messages, "messages")
    return _turns(messages, "role", "content", _ROLES)


def _sharegpt(row: Row, fields: DatasetFields) -> Turns | Drop:
    messages = _list_of_turns(row, fields.conversations, "conversations")
    turns = _turns(messages, "from", "value", _SHAREGPT_ROLES)
    if isinstance(turns, Drop):
        return turns
    system = _system_turn(row, fields)
    if system and turns[0].role == SYSTEM:
        raise _Invalid(f"has a system turn and a column {fields.system!r}: remove one of them")
    return (*system, *turns)


def _preference(row: Row, fields: DatasetFields) -> Answers | Drop:
    """Texts, or turns. Without a column for the prompt, it is what both answers begin with."""
    answers = _column(row, fields.chosen, "chosen"), _column(row, fields.rejected, "rejected")
    _check_one_kind(row, fields)
    if all(isinstance(one, list) for one in answers):
        return _turns_of_pair(row, fields, *answers)
    names = fields.chosen, fields.rejected
    chosen, rejected = (
        "" if one is None else _text(one, f"column {name!r}")
        for one, name in zip(answers, names, strict=True)
    )
    if row.get(fields.prompt) is None:
        cut = prompt_length(chosen, rejected)
        prompt, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
    else:
        prompt = _text(row[fields.prompt], f"column {fields.prompt!r}")
    if not (chosen.strip() and rejected.strip()):
        return Drop.NO_ANSWER
    asked = Turn(USER, prompt)
    return Answers((asked, Turn(ASSISTANT, chosen)), (asked, Turn(ASSISTANT, rejected)), plain=True)


def _check_one_kind(row: Row, fields: DatasetFields) -> None:
    """Raises _Invalid where some of a pair's columns are lists of turns, and others not."""
    given = {name: row.get(name) for name in (fields.prompt, fields.chosen, fields.rejected)}
    turns = [name for name, value in given.items() if isinstance(value, list)]
    others = [name for name, value in given.items() if not isinstance(value, list) and value is not None]
    if turns and others:
        twice = ", or remove it if both answers begin with it" if others == [fields.prompt] else ""
        raise _Invalid(
            f"column {others[0]!r} is {_kind(given[others[0]])}, and {turns[0]!r} a list of turns: prompt and answers must "
            f"be all texts, or all turns; change {others[0]!r}{twice}"
        )


def _turns_of_pair(row: Row, fields: DatasetFields, chosen: list[Any], rejected: list[Any]) -> Answers | Drop:
    before = row.get(fields.prompt)
    if before is None:
        cut = prompt_length(chosen, rejected)
        before, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
    sides = []
    for name, after in ((fields.chosen, chosen), (fields.rejected, rejected)):
        turns = _turns([*before, *after], "role", "content", _ROLES)
        if isinstance(turns, Drop):
            return turns
        if tools_of(row) or any(turn.role == TOOL or turn.calls for turn in turns):
            return Drop.TOOL_CALLS
        if any(turn.fields for turn in turns):
            return Drop.REASONING
        if len(turns) <= len(before):
            return Drop.NO_ANSWER
        if turns[len(before)].role != ASSISTANT:
            raise _Invalid(
                f"column {name!r} begins with a turn of {turns[len(before)].role}; what follows the prompt must be an "
                f"assistant's answer"
            )
        context = (turn._replace(learnt=turn.role != ASSISTANT) for turn in turns[: len(before)])
        answer = (turn._replace(learnt=True) for turn in turns[len(before) :])
        sides.append((*context, *answer))
    return Answers(sides[0], sides[1], plain=False)


_READERS: Final[dict[DatasetFormat, Callable[[Row, DatasetFields], Turns | str | Answers | Drop]]] = {
    DatasetFormat.PROMPT_COMPLETION: _prompt_completion,
    DatasetFormat.MESSAGES: _messages,
    DatasetFormat.SHAREGPT: _sharegpt,
    DatasetFormat.ALPACA: _alpaca,
    DatasetFormat.TEXT: _whole_text,
    DatasetFormat.PREFERENCE: _preference,
}


_CONVERSATIONS: Final = (DatasetFormat.MESSAGES, DatasetFormat.SHAREGPT)


# Columns that are looked at beside those of the format, which ``dataset.fields`` cannot rename.
_BESIDE: Final[Mapping[DatasetFormat, tuple[str, ...]]] = {
    DatasetFormat.MESSAGES: TOOL_COLUMNS,
    DatasetFormat.SHAREGPT: TOOL_COLUMNS,
    DatasetFormat.ALPACA: ("history",),
    DatasetFormat.PREFERENCE: TOOL_COLUMNS,
}


def columns_of(format: DatasetFormat, fields: DatasetFields) -> tuple[str, ...]:
    """All columns that a row of ``format`` is read from; a file may lack the optional ones."""
    own = (getattr(fields, column) for column in SHAPE_OF[format].columns)
    weight = () if fields.weight is None else (fields.weight,)
    return (*own, *_BESIDE.get(format, ()), *MEDIA_COLUMNS, *weight)


def _turns(messages: list[Any], role_key: str, content_key: str, roles: Mapping[str, str]) -> Turns | Drop:
    """Rules, in this order: 1. a malformed turn is invalid; 2. an assistant turn without text and without a call drops the
    row, wherever it stands; 3. what comes after the last answer that is learnt is cut.
    """
    turns: list[Turn] = []
    blank = weightless = False
    for number, message in enumerate(messages, start=1):
        where = f"turn {number}"
        if not isinstance(message, dict):
            raise _Invalid(f"{where} is {_kind(message)}, not an object with {role_key} and {content_key}")
        given = message.get(role_key)
        role = roles.get(given) if isinstance(given, str) else None
        if role is None:
            shown = json.dumps(given)[:40]
            raise _Invalid(f"{where} has {role_key} {shown}; valid are {', '.join(_shown(roles))}")
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
        raise _Invalid(f"{what} {media}")
    beside: Fields | None = None
    try:
        if is_call:
            beside, content = call_of_text(_text(content, what)), ""
        elif role == ASSISTANT:
            beside = fields_of(message)
        elif role == TOOL:
            beside = result_fields(message)
    except Malformed as flaw:
        raise _Invalid(f"{where}: {flaw}") from None
    learnt = role != ASSISTANT or _is_learnt(message.get("weight"), where)
    if content is None and role in (ASSISTANT, TOOL):
        content = ""
    return Turn(role, _text(content, what), learnt, beside)


def _shown(roles: Mapping[str, str]) -> tuple[str, ...]:
    return _OPENAI_ROLES_SHOWN if roles is _ROLES else tuple(roles)


def _is_learnt(weight: Any, where: str) -> bool:
    """``weight`` is that of an answer: 0 or 1, as OpenAI's fine-tuning has it."""
    if weight not in (None, 0, 1):
        raise _Invalid(f"{where} has weight {json.dumps(weight, default=str)[:40]}; that of a turn is 0 or 1")
    return weight is None or bool(weight)


def _list_of_turns(row: Row, column: str, field: str) -> list[Any]:
    messages = _column(row, column, field)
    if not isinstance(messages, list):
        raise _Invalid(f"column {column!r} is {_kind(messages)}, not a list of turns")
    return messages


def _system_turn(row: Row, fields: DatasetFields) -> Turns:
    text = _optional_text(row, fields.system)
    return (Turn(SYSTEM, text),) if text else ()


def _answer(row: Row, name: str, field: str) -> str | None:
    """None where there is none to learn."""
    value = _column(row, name, field)
    if value is None:
        return None
    answer = _text(value, f"column {name!r}")
    return answer if answer.strip() else None


def _optional_text(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    text = _text(value, f"column {name!r}")
    return text if text.strip() else ""


def _weight(row: Row, name: str | None) -> float:
    """A number, or a text that is one as CSV has it."""
    if name is None:
        return 1.0
    value = _column(row, name, "weight")
    try:
        weight = (
            float(value)
            if isinstance(value, int | float | Decimal | str) and not isinstance(value, bool)
            else None
        )
    except (ValueError, OverflowError):
        weight = None
    if weight is None:
        raise _Invalid(f"column {name!r} is {_kind(value)}, not a number to weigh the row by")
    if not math.isfinite(weight) or weight < 0:
        raise _Invalid(f"column {name!r} is {weight}; a weight is 0 or more, and finite")
    return weight


def _column(row: Row, name: str, field: str) -> Any:
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
            raise _Invalid(f"{what} has half a surrogate pair, which is not a character") from None
    return value


def _kind(value: Any) -> str:
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
