"""A chat template, the tokenizer's or a task's own, applied to many conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from mlora_worker.data.rows import Turn
from mlora_worker.data.sandbox import TaskTemplate

Turns = Sequence[Turn]


class Refused(Exception):
    """The template itself refuses a conversation, in its own words."""


class ChatTemplate:
    """What ``tokenizer.apply_chat_template`` renders. That checks and copies each message before, which takes half as long
    again as the rendering: so the compiled template (in transformers' own sandbox) is called at once.

    ``own``: another template than the tokenizer's, with bounds (``sandbox``). Raises InvalidTemplate for one that is none.
    """

    def __init__(self, tokenizer: Any, own: str | None = None) -> None:
        self._template: Any = (
            TaskTemplate(own) if own is not None else _compile_jinja_template(tokenizer.get_chat_template())
        )
        self._named = dict(tokenizer.special_tokens_map)

    def render(self, conversations: Sequence[Turns], *, prompt: bool = False) -> list[str | Refused]:
        """One text or refusal for each. ``prompt``: with what a server writes before the model answers."""
        return [self._one(turns, prompt) for turns in conversations]

    def _one(self, turns: Turns, prompt: bool) -> str | Refused:
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            rendered: str = self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **self._named
            )
        except TemplateError as error:
            return Refused(str(error))
        return rendered
