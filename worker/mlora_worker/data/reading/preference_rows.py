"""Rows of preferences: two answers to one prompt, or one that is desirable or not. Texts, or turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlora_worker.data.reading.answer_pairs import Answer, Answers, prompt_length
from mlora_worker.data.reading.row_types import ASSISTANT, USER, Drop, Turn
from mlora_worker.data.reading.row_values import (
    ROLES,
    InvalidValue,
    Row,
    Turns,
    column_of,
    kind_of,
    text_of,
    turns_of,
)
from mlora_worker.data.reading.tool_turns import tools_of
from mlora_worker.protocol import DatasetFields, truth_of


def pair_of(row: Row, fields: DatasetFields) -> Answers | Drop:
    """Texts, or turns. Without a column for the prompt, it is what both answers begin with."""
    answers = column_of(row, fields.chosen, "chosen"), column_of(row, fields.rejected, "rejected")
    _check_one_kind(row, fields.prompt, (fields.chosen, fields.rejected))
    if all(isinstance(one, list) for one in answers):
        return _turns_of_pair(row, fields, *answers)
    names = fields.chosen, fields.rejected
    chosen, rejected = (_text_or_nothing(one, name) for one, name in zip(answers, names, strict=True))
    if row.get(fields.prompt) is None:
        cut = prompt_length(chosen, rejected)
        prompt, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
    else:
        prompt = text_of(row[fields.prompt], f"column {fields.prompt!r}")
    if not (chosen.strip() and rejected.strip()):
        return Drop.NO_ANSWER
    asked = Turn(USER, prompt)
    return Answers((asked, Turn(ASSISTANT, chosen)), (asked, Turn(ASSISTANT, rejected)), plain=True)


def labelled_answer(row: Row, fields: DatasetFields) -> Answer | Drop:
    """Texts, or turns."""
    prompt = column_of(row, fields.prompt, "prompt")
    completion = column_of(row, fields.completion, "completion")
    label = column_of(row, fields.label, "label")
    desirable = truth_of(label)
    if desirable is None:
        raise InvalidValue(
            f"column {fields.label!r} is {kind_of(label)}, not true or false: whether the answer is desirable"
        )
    _check_one_kind(row, fields.prompt, (fields.completion,))
    if isinstance(prompt, list) and isinstance(completion, list):
        turns = _behind(prompt, completion, fields.completion)
        return turns if isinstance(turns, Drop) else Answer(turns, False, desirable, tools_of(row))
    answer = _text_or_nothing(completion, fields.completion)
    if not answer.strip():
        return Drop.NO_ANSWER
    asked = Turn(USER, text_of(prompt, f"column {fields.prompt!r}"))
    return Answer((asked, Turn(ASSISTANT, answer)), True, desirable)


def _text_or_nothing(value: Any, name: str) -> str:
    return "" if value is None else text_of(value, f"column {name!r}")


def _check_one_kind(row: Row, prompt: str, answers: Sequence[str]) -> None:
    """Raises InvalidValue where some of these columns are lists of turns, and others not."""
    given = {name: row.get(name) for name in (prompt, *answers)}
    turns = [name for name, value in given.items() if isinstance(value, list)]
    others = [name for name, value in given.items() if not isinstance(value, list) and value is not None]
    if turns and others:
        of_pair = others == [prompt] and len(answers) > 1
        twice = ", or remove it if both answers begin with it" if of_pair else ""
        raise InvalidValue(
            f"column {others[0]!r} is {kind_of(given[others[0]])}, and {turns[0]!r} a list of turns: prompt and answers "
            f"must be all texts, or all turns; change {others[0]!r}{twice}"
        )


def _turns_of_pair(row: Row, fields: DatasetFields, chosen: list[Any], rejected: list[Any]) -> Answers | Drop:
    before = row.get(fields.prompt)
    if before is None:
        cut = prompt_length(chosen, rejected)
        before, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
    first = _behind(before, chosen, fields.chosen)
    if isinstance(first, Drop):
        return first
    second = _behind(before, rejected, fields.rejected)
    return second if isinstance(second, Drop) else Answers(first, second, False, tools_of(row))


def _behind(before: list[Any], after: list[Any], name: str) -> Turns | Drop:
    """An answer's turns with its prompt in front, which is context."""
    turns = turns_of([*before, *after], "role", "content", ROLES)
    if isinstance(turns, Drop):
        return turns
    if len(turns) <= len(before):
        return Drop.NO_ANSWER
    if turns[len(before)].role != ASSISTANT:
        raise InvalidValue(
            f"column {name!r} begins with a turn of {turns[len(before)].role}; what follows the prompt must be an "
            f"assistant's answer"
        )
    context = (turn._replace(learnt=turn.role != ASSISTANT) for turn in turns[: len(before)])
    return (*context, *(turn._replace(learnt=True) for turn in turns[len(before) :]))
