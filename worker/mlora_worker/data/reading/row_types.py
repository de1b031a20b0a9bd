"""The nouns between a file and its tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from mlora_worker.data.reading.tool_turns import texts_in

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"


class InvalidRow(NamedTuple):
    """What is wrong with one row, in words that a user understands."""

    message: str


class Record(NamedTuple):
    """One row as a file has it. ``number`` is that of its line, or of the row where a file has no lines; 1-based."""

    number: int
    value: Mapping[str, Any] | InvalidRow


class Drop(StrEnum):
    """Why a well-formed row is not used; the names that ``status.data.dropped`` counts."""

    NO_ANSWER = "NoAnswer"  # no assistant turn, or one that is null, empty or blank
    EMPTY_TEXT = "EmptyText"  # format text: null, empty or blank
    TOOL_CALLS = "ToolCalls"  # the chat template leaves out its tool calls, tool results or tool definitions
    REASONING = (
        "Reasoning"  # the chat template leaves out an answer's thoughts, which stand in a field of their own
    )
    ALREADY_RENDERED = "AlreadyRendered"  # a turn's text has what the chat template writes around turns
    TEMPLATE_MISMATCH = (
        "TemplateMismatch"  # the tokens of the answer cannot be found in the output of the chat template
    )
    ZERO_WEIGHT = "ZeroWeight"  # its weight is 0, or that of each of its answers
    TOO_LONG = "TooLong"  # longer than maxSeqLength, with overlong: skip
    EQUAL_ANSWERS = (
        "EqualAnswers"  # of a pair: the tokens are the same, as the row has them or once it is truncated
    )
    NO_SUPERVISED_TOKENS = "NoSupervisedTokens"  # truncation cut the whole answer off


class Turn(NamedTuple):
    role: str  # system, user, assistant or tool
    content: str
    learnt: bool = True  # False: an answer that is context, and is not trained on
    fields: Mapping[str, Any] | None = None  # that templates read beside content: see ``tool_turns``

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = (self.fields or {}).get("tool_calls", ())
        return found


@dataclass(frozen=True, slots=True)
class Chat:
    line: int  # 1-based; of the row, where a file has no lines
    turns: tuple[Turn, ...]  # the last is an assistant's, and learnt
    weight: float = 1.0
    # A prompt and what follows it, tokenised as they stand: True; False: never. None: without a chat template alone.
    plain: bool | None = None
    tools: tuple[Mapping[str, Any], ...] = ()  # definitions

    @property
    def texts(self) -> list[str]:
        """All of them: a template may write each."""
        beside = [turn.fields for turn in self.turns if turn.fields]
        return [turn.content for turn in self.turns] + list(texts_in([beside, self.tools]))


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text that is learnt as it stands."""

    line: int
    text: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Two answers to one prompt. What is learnt begins with the first learnt turn of each, and goes to its end."""

    line: int
    chosen: Chat
    rejected: Chat
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class UnpairedAnswer:
    """One answer to a prompt, which is desirable or not. What is learnt is as that of a pair's answer."""

    line: int
    chat: Chat
    desirable: bool
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Dropped:
    line: int
    rule: Drop


ReadRow = Chat | PlainText | AnswerPair | UnpairedAnswer | Dropped
