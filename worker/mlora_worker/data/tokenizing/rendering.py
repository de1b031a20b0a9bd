"""A chat template, the tokenizer's or a task's own, applied to many conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date, datetime, time
from typing import Any

from jinja2.exceptions import TemplateSyntaxError
from jinja2.runtime import new_context
from transformers.utils.chat_template_utils import _compile_jinja_template

from mlora_worker.data.reading.row_types import Turn
from mlora_worker.data.tokenizing.sandbox import InvalidTemplate
from mlora_worker.data.tokenizing.sandboxed_template import OwnTemplate
from mlora_worker.data.tokenizing.template_messages import (
    LONGEST,
    keep_literal,
    message_without_rows,
    raising,
)

Turns = Sequence[Turn]


class ConversationRejected(Exception):
    """The template itself refuses a conversation, in words that hold nothing of it (``template_messages``)."""


def uses_date(tokenizer: Any, own: str | None = None) -> bool:
    """Whether a rendering may be another one on another day. ``own``: see ``ChatTemplate``."""
    source = own if own is not None else json.dumps(tokenizer.chat_template)
    return "strftime_now" in source


class ChatTemplate:
    """What ``tokenizer.apply_chat_template`` renders. That checks and copies each message before, which takes half as long
    again as the rendering: so the compiled template (in transformers' own sandbox) is called at once.

    ``own``: another template than the tokenizer's, rendered in a process of its own (``sandboxed_template``), which ends
    with ``close``. Raises InvalidTemplate for one that is none, and where the tokenizer's is none.

    For a template that asks, it is always the beginning of ``day``: the same rows are rendered the same on every day.
    """

    def __init__(self, tokenizer: Any, own: str | None = None, *, day: date | None = None) -> None:
        """``day`` None: today."""
        now = datetime.combine(day or date.today(), time())
        self._names: dict[str, Any] = {"tools": None, "documents": None, **tokenizer.special_tokens_map}
        self._own = OwnTemplate(own, now) if own is not None else None
        if self._own is None:
            self._source = _source_of(tokenizer)
            self._template, literal = _compiled(self._source)
            known = {
                "strftime_now": lambda written: now.strftime(written),
                "raise_exception": raising(literal),
            }
            self._names = {**self._template.globals, **self._names, **known}

    def render(
        self, conversations: Sequence[Turns], *, prompt: bool = False
    ) -> list[str | ConversationRejected]:
        """One text or refusal for each. ``prompt``: with what a server writes before the model answers."""
        return self.render_all([(turns, prompt) for turns in conversations])

    def render_all(self, asked: Sequence[tuple[Turns, bool]]) -> list[str | ConversationRejected]:
        """Each conversation, with ``prompt`` or without."""
        if self._own is None:
            return [self._one(turns, prompt) for turns, prompt in asked]
        given = [
            (_messages(turns), {**self._names, "add_generation_prompt": prompt}) for turns, prompt in asked
        ]
        answers = self._own.render_all(given)
        return [one if isinstance(one, str) else ConversationRejected(str(one)) for one in answers]

    def close(self) -> None:
        if self._own is not None:
            self._own.close()

    def _one(self, turns: Turns, prompt: bool) -> str | ConversationRejected:
        template = self._template
        # As ``template.render`` does it, which gathers the environment's names anew each time: half of a rendering.
        given = {**self._names, "messages": _messages(turns), "add_generation_prompt": prompt}
        known = new_context(template.environment, template.name, template.blocks, given, shared=True)
        try:
            try:
                rendered: str = template.environment.concat(template.root_render_func(known))
            except Exception:
                template.environment.handle_exception()
        except MemoryError:
            raise
        except Exception as error:  # of its expressions: a mistake in it, or a row that it does not take
            return ConversationRejected(message_without_rows(error, self._source))
        return rendered


def _source_of(tokenizer: Any) -> str:
    """Of the tokenizer's own template."""
    given = tokenizer.chat_template
    if isinstance(given, dict) and "default" not in given:
        names = ", ".join(sorted(map(str, given)))[:LONGEST]
        raise InvalidTemplate(f"there are several ({names}), and none of them is named default")
    source: str = tokenizer.get_chat_template()
    return source


def _compiled(source: str) -> tuple[Any, frozenset[str]]:
    """In transformers' own sandbox; and the texts that it may raise."""
    try:
        environment = _compile_jinja_template(source).environment
        tree = environment.parse(source)
        literal = keep_literal(tree)
        return environment.from_string(tree), literal
    except TemplateSyntaxError as error:
        raise InvalidTemplate(f"line {error.lineno}: {error.message}"[:LONGEST]) from None
    except MemoryError:
        raise
    except Exception as error:  # such as ValueError for a number of five thousand digits
        raise InvalidTemplate(f"it cannot be compiled: {type(error).__name__}: {error}"[:LONGEST]) from None


def _messages(turns: Turns) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns]
