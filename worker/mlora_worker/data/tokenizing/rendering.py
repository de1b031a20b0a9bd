"""A chat template, the tokenizer's or a task's own, applied to many conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from typing import Any, NamedTuple

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
Tools = Sequence[Mapping[str, Any]]
Asked = tuple[Turns, bool, Tools]  # with the generation prompt, or without; and the definitions of tools
_FOR_TOOLS = "tool_use"  # of several templates, the one that transformers takes for rows with tools


class _Compiled(NamedTuple):
    source: str
    template: Any
    names: dict[str, Any]


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
            given = tokenizer.chat_template
            several = given if isinstance(given, dict) else {}
            self._usual = self._compiled(_source_of(tokenizer), now)
            tools = several.get(_FOR_TOOLS)
            self._for_tools = self._compiled(tools, now) if tools is not None else self._usual

    def _compiled(self, source: str, now: datetime) -> _Compiled:
        template, literal = _compiled(source)
        known = {"strftime_now": lambda written: now.strftime(written), "raise_exception": raising(literal)}
        return _Compiled(source, template, {**template.globals, **self._names, **known})

    def render(
        self, conversations: Sequence[Turns], *, prompt: bool = False
    ) -> list[str | ConversationRejected]:
        """One text or refusal for each. ``prompt``: with what a server writes before the model answers."""
        return self.render_all([(turns, prompt, ()) for turns in conversations])

    def render_all(self, asked: Sequence[Asked]) -> list[str | ConversationRejected]:
        if self._own is None:
            return [self._one(*one) for one in asked]
        given = [
            (_messages(turns), {**self._names, **_names(prompt, tools)}) for turns, prompt, tools in asked
        ]
        answers = self._own.render_all(given)
        return [one if isinstance(one, str) else ConversationRejected(str(one)) for one in answers]

    def close(self) -> None:
        if self._own is not None:
            self._own.close()

    def _one(self, turns: Turns, prompt: bool, tools: Tools) -> str | ConversationRejected:
        source, template, names = self._for_tools if tools else self._usual
        # As ``template.render`` does it, which gathers the environment's names anew each time: half of a rendering.
        given = {**names, "messages": _messages(turns), **_names(prompt, tools)}
        known = new_context(template.environment, template.name, template.blocks, given, shared=True)
        try:
            try:
                rendered: str = template.environment.concat(template.root_render_func(known))
            except Exception:
                template.environment.handle_exception()
        except MemoryError:
            raise
        except Exception as error:  # of its expressions: a mistake in it, or a row that it does not take
            return ConversationRejected(message_without_rows(error, source))
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


def _messages(turns: Turns) -> list[dict[str, Any]]:
    return [{"role": turn.role, "content": turn.content, **(turn.fields or {})} for turn in turns]


def _names(prompt: bool, tools: Tools) -> dict[str, Any]:
    return {"add_generation_prompt": prompt, "tools": list(tools) or None}
