"""A tokenizer's chat template, for many conversations in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jinja2.exceptions import TemplateError

from mlora_worker.data.rows import Turn

Turns = Sequence[Turn]


class Refused(Exception):
    """The template itself refuses a conversation, in its own words."""


class Template(Protocol):
    def render(self, conversations: Sequence[Turns], *, prompt: bool = False) -> list[str | Refused]:
        """One text or refusal for each. ``prompt``: with what a server writes before the model answers."""
        ...


class TokenizerTemplate:
    """The base model's own. A call's overhead is larger than the rendering of a short chat: so all in one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, conversations: Sequence[Turns], *, prompt: bool = False) -> list[str | Refused]:
        if not conversations:
            return []
        messages = [[turn._asdict() for turn in turns] for turns in conversations]
        try:
            return list(self._apply(messages, prompt))
        except TemplateError:
            return [self._one(conversation, prompt) for conversation in messages]

    def _one(self, conversation: list[dict[str, Any]], prompt: bool) -> str | Refused:
        try:
            return str(self._apply([conversation], prompt)[0])
        except TemplateError as error:
            return Refused(str(error))

    def _apply(self, conversations: list[list[dict[str, Any]]], prompt: bool) -> list[str]:
        rendered: list[str] = self._tokenizer.apply_chat_template(
            conversations, tokenize=False, add_generation_prompt=prompt
        )
        return rendered
