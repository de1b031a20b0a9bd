"""Rows of a file as chats or texts. Pure.

A row is one of three things:
1. *invalid*: no JSON object, a column is missing, a text is no text, a role is unknown. The task fails and
names the line, because such a row is a mistake that nobody can train around. 2. *dropped*: well-formed, but
without anything to learn; counted by rule (``Drop``). 3. a ``Chat``: turns that end with an answer, where turns
after the last answer teach nothing and are cut; a ``PlainText``; an ``AnswerPair`` of two answers to one prompt, or an
``UnpairedAnswer`` that is desirable or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Final

from mlora_worker.data.errors import DataError
from mlora_worker.data.reading.answer_pairs import Answer, Answers
from mlora_worker.data.reading.media import MEDIA_COLUMNS, media_of_row
from mlora_worker.data.reading.preference_rows import labelled_answer, pair_of
from mlora_worker.data.reading.row_types import (
    ASSISTANT,
    SYSTEM,
    USER,
    Chat,
    Drop,
    Dropped,
    InvalidRow,
    PlainText,
    ReadRow,
    Record,
    Turn,
)
from mlora_worker.data.reading.row_values import (
    ROLES,
    SHAREGPT_ROLES,
    InvalidValue,
    Row,
    Turns,
    answer_of,
    column_of,
    kind_of,
    list_of_turns,
    optional_text,
    text_of,
    turns_of,
)
from mlora_worker.data.reading.tool_turns import TOOL_COLUMNS, Malformed, tools_of
from mlora_worker.protocol import SHAPE_OF, DatasetFields, DatasetFormat, FailureReason

MOST_ERRORS = 10  # of a file that are listed
_LONGEST_FLAW = 200  # characters: a column's name may be as long as the row


def read_rows(
    records: Iterable[Record], format: DatasetFormat, fields: DatasetFields, source: str, unit: str = "line"
) -> Iterator[ReadRow]:
    """Rows in the file's order. ``source`` is how messages name the file, ``unit`` what its numbers count.

    Raises DataError (InvalidRow) that lists the first invalid rows: at the end, or once there are
    ``MOST_ERRORS``.
    """
    read = _READERS[format]
    flaws: list[str] = []
    for number, value in records:
        try:
            if isinstance(value, InvalidRow):
                raise InvalidValue(value.message)
            media = media_of_row(value)
            if media is not None:
                raise InvalidValue(media)
            weight = _weight(value, fields.weight)
            found = read(value, fields)
            tools = tools_of(value) if format in _CONVERSATIONS and isinstance(found, tuple) else ()
        except (InvalidValue, Malformed) as flaw:
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
        elif isinstance(found, Answers | Answer):
            yield found.row(number, weight)
        else:
            yield Chat(number, found, weight, tools=tools)
    if flaws:
        more = " (and perhaps more)" if len(flaws) == MOST_ERRORS else ""
        raise DataError(FailureReason.INVALID_ROW, f"{source} has invalid rows{more}: " + "; ".join(flaws))


def _prompt_completion(row: Row, fields: DatasetFields) -> Turns | Drop:
    question = text_of(column_of(row, fields.prompt, "prompt"), f"column {fields.prompt!r}")
    answer = answer_of(row, fields.completion, "completion")
    return Drop.NO_ANSWER if answer is None else (Turn(USER, question), Turn(ASSISTANT, answer))


def _alpaca(row: Row, fields: DatasetFields) -> Turns | Drop:
    """The user's turn is the instruction and, after an empty line, its input where there is one."""
    if row.get("history"):
        raise InvalidValue("has earlier turns in column 'history', which alpaca rows may not; use messages")
    asked = text_of(column_of(row, fields.instruction, "instruction"), f"column {fields.instruction!r}")
    given = optional_text(row, fields.input)
    answer = answer_of(row, fields.output, "output")
    if answer is None:
        return Drop.NO_ANSWER
    question = f"{asked}\n\n{given}" if given else asked
    return (*_system_turn(row, fields), Turn(USER, question), Turn(ASSISTANT, answer))


def _whole_text(row: Row, fields: DatasetFields) -> str | Drop:
    value = column_of(row, fields.text, "text")
    if value is None:
        return Drop.EMPTY_TEXT
    text = text_of(value, f"column {fields.text!r}")
    return text if text.strip() else Drop.EMPTY_TEXT


def _messages(row: Row, fields: DatasetFields) -> Turns | Drop:
    messages = list_of_turns(row, fields.messages, "messages")
    return turns_of(messages, "role", "content", ROLES)


def _sharegpt(row: Row, fields: DatasetFields) -> Turns | Drop:
    messages = list_of_turns(row, fields.conversations, "conversations")
    turns = turns_of(messages, "from", "value", SHAREGPT_ROLES)
    if isinstance(turns, Drop):
        return turns
    system = _system_turn(row, fields)
    if system and turns[0].role == SYSTEM:
        raise InvalidValue(f"has a system turn and a column {fields.system!r}: remove one of them")
    return (*system, *turns)


_READERS: Final[
    dict[DatasetFormat, Callable[[Row, DatasetFields], Turns | str | Answers | Answer | Drop]]
] = {
    DatasetFormat.PROMPT_COMPLETION: _prompt_completion,
    DatasetFormat.MESSAGES: _messages,
    DatasetFormat.SHAREGPT: _sharegpt,
    DatasetFormat.ALPACA: _alpaca,
    DatasetFormat.TEXT: _whole_text,
    DatasetFormat.PREFERENCE: pair_of,
    DatasetFormat.UNPAIRED_PREFERENCE: labelled_answer,
}


_CONVERSATIONS: Final = (DatasetFormat.MESSAGES, DatasetFormat.SHAREGPT)


# Columns that are looked at beside those of the format, which ``dataset.fields`` cannot rename.
_BESIDE: Final[Mapping[DatasetFormat, tuple[str, ...]]] = {
    DatasetFormat.MESSAGES: TOOL_COLUMNS,
    DatasetFormat.SHAREGPT: TOOL_COLUMNS,
    DatasetFormat.ALPACA: ("history",),
    DatasetFormat.PREFERENCE: TOOL_COLUMNS,
    DatasetFormat.UNPAIRED_PREFERENCE: TOOL_COLUMNS,
}


def columns_of(format: DatasetFormat, fields: DatasetFields) -> tuple[str, ...]:
    """All columns that a row of ``format`` is read from; a file may lack the optional ones."""
    own = (getattr(fields, column) for column in SHAPE_OF[format].columns)
    weight = () if fields.weight is None else (fields.weight,)
    return (*own, *_BESIDE.get(format, ()), *MEDIA_COLUMNS, *weight)


def _system_turn(row: Row, fields: DatasetFields) -> Turns:
    text = optional_text(row, fields.system)
    return (Turn(SYSTEM, text),) if text else ()


def _weight(row: Row, name: str | None) -> float:
    """A number, or a text that is one as CSV has it."""
    if name is None:
        return 1.0
    value = column_of(row, name, "weight")
    try:
        weight = (
            float(value)
            if isinstance(value, int | float | Decimal | str) and not isinstance(value, bool)
            else None
        )
    except (ValueError, OverflowError):
        weight = None
    if weight is None:
        raise InvalidValue(f"column {name!r} is {kind_of(value)}, not a number to weigh the row by")
    if not math.isfinite(weight) or weight < 0:
        raise InvalidValue(f"column {name!r} is {weight}; a weight is 0 or more, and finite")
    return weight
