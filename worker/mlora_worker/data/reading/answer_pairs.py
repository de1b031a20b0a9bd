"""Answers to one prompt: two, or one that is desirable or not. Where the prompt ends, if no column says so. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mlora_worker.data.reading.row_types import AnswerPair, Chat, Turn, UnpairedAnswer

Tools = tuple[Mapping[str, Any], ...]


class Answers(NamedTuple):
    chosen: tuple[Turn, ...]  # with the prompt in front
    rejected: tuple[Turn, ...]
    plain: bool  # texts, which no chat template goes around
    tools: Tools = ()

    def row(self, line: int, weight: float) -> AnswerPair:
        chosen, rejected = (
            Chat(line, turns, weight, self.plain, self.tools) for turns in (self.chosen, self.rejected)
        )
        return AnswerPair(line, chosen, rejected, weight)


class Answer(NamedTuple):
    turns: tuple[Turn, ...]  # with the prompt in front
    plain: bool
    desirable: bool
    tools: Tools = ()

    def row(self, line: int, weight: float) -> UnpairedAnswer:
        chat = Chat(line, self.turns, weight, self.plain, self.tools)
        return UnpairedAnswer(line, chat, self.desirable, weight)


def prompt_length(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Of what both begin with: characters of texts, or turns. It leaves something of each, and no space at its end: that
    belongs to the answers' first words."""
    most = min(len(chosen), len(rejected)) - 1
    same = next((at for at in range(max(0, most)) if chosen[at] != rejected[at]), max(0, most))
    return same - 1 if same and chosen[same - 1] == " " else same
