"""Six published forms of templates with tools: as a server renders them, and with marks around what an assistant writes.

Those of TRL's package are read from it, marks and all, where TRL has them. Llama 3.1 gets marks here, and Mistral's (of
version 3, with the tekken vocabulary and without) are written here after what mistral-common writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny_tokenizer import NEWER_WORDS, tiny_tokenizer

_FOLDER = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"

_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
_INST = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip

# Definitions stand before the last user's turn, and the system's words in it; a call needs an id of nine characters.
_MISTRAL = """
{%- set said = namespace(system='', last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}{%- set said.system = message.content + '\\n\\n' -%}
  {%- elif message.role == 'user' -%}{%- set said.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- if loop.index0 == said.last and tools -%}
      {{- '[AVAILABLE_TOOLS]GAP' -}}{{- tools | tojson -}}{{- '[/AVAILABLE_TOOLS]' -}}
    {%- endif -%}
    {{- '[INST]GAP' + (said.system if loop.index0 == said.last else '') + message.content + '[/INST]' -}}
  {%- elif message.role == 'tool' -%}
    {{- '[TOOL_RESULTS]GAP{"content": ' -}}{{- message.content | tojson -}}
    {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' -}}
  {%- elif message.role == 'assistant' -%}
    {%- generation -%}
    {%- if message.tool_calls -%}
      {{- '[TOOL_CALLS]GAP[' -}}
      {%- for c in message.tool_calls -%}
        {%- if c.id is not defined or c.id | length != 9 -%}{{- raise_exception('A call needs an id of 9') -}}{%- endif -%}
        {{- ', ' if not loop.first -}}
        {{- '{"name": "' + c.function.name + '", "arguments": ' -}}{{- c.function.arguments | tojson -}}
        {{- ', "id": "' + c.id + '"}' -}}
      {%- endfor -%}
      {{- ']' + eos_token -}}
    {%- else -%}{{- 'GAP' + message.content + eos_token -}}{%- endif -%}
    {%- endgeneration -%}
  {%- endif -%}
{%- endfor -%}
"""
_LLAMA_WORDS = (
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}",
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}{%- if message.role == 'assistant' %}"
    "{%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}"
    "{%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}",
)
_LLAMA_CALL = (
    ('{{- \'{"name": "\' + tool_call.name', '{%- generation %}{{- \'{"name": "\' + tool_call.name'),
    ('{{- "}" }}\n', '{{- "}<|eot_id|>" }}{%- endgeneration %}\n'),
    ('{%- else %}\n            {{- "<|eot_id|>" }}', "{%- else %}"),
)


@dataclass(frozen=True)
class Published:
    """``as_served``: the model's own. ``marked``: with ``{% generation %}`` around what an assistant writes. ``beyond``:
    what these marks have around it that a server writes, or nobody."""

    name: str
    as_served: str
    marked: str
    tokens: tuple[str, ...]
    eos: str
    bos: str | None = None
    ends: tuple[str, ...] = ()  # what else ends a turn
    beyond: tuple[str, ...] = ()

    def tokenizer(self) -> Any:
        return tiny_tokenizer(
            self.as_served,
            specials=list(self.tokens),
            words=NEWER_WORDS,
            eos_token=self.eos,
            bos_token=self.bos,
        )


def _read(name: str) -> str:
    """On one day of all."""
    source = (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return source.replace('strftime_now("%Y-%m-%d")', '"2026-01-31"')


def _replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, (text.count(old), old)
        text = text.replace(old, new)
    return text


def _mistral(name: str, gap: str) -> Published:
    marked = _MISTRAL.replace("GAP", gap)
    unmarked = re.sub(r"\{%- (?:end)?generation -%\}", "", marked)
    return Published(name, unmarked, marked, _INST, "</s>", "<s>")


PUBLISHED = (
    Published("Qwen2.5", _read("qwen2_5"), _read("qwen2_5_training"), _IM, "<|im_end|>", beyond=("\n",)),
    Published("Qwen3", _read("qwen3"), _read("qwen3_training"), _IM, "<|im_end|>", beyond=("\n",)),
    Published(
        "Llama 3.1", _read("llama3_1"), _replaced(_read("llama3_1"), _LLAMA_WORDS, *_LLAMA_CALL), _LLAMA, "<|eot_id|>",
        "<|begin_of_text|>",
    ),
    _mistral("Mistral v3", " "),
    _mistral("Mistral tekken", ""),
    Published(
        "gpt-oss", _read("gptoss"), _read("gptoss_training"), _HARMONY, "<|return|>", ends=("<|end|>", "<|call|>"),
        beyond=("<|start|>assistant",),
    ),
)  # fmt: skip
FORM_OF = {form.name: form for form in PUBLISHED}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Rain.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def _calls(*cities: str, **more: str) -> dict[str, Any]:
    calls = [
        {"id": f"call{n:05}", "type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
        for n, city in enumerate(cities, start=1)
    ]  # fmt: skip
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def _result(n: int = 1) -> dict[str, Any]:
    return {
        "role": "tool",
        "name": "get_weather",
        "tool_call_id": f"call{n:05}",
        "content": f"rain, {3 + n} mm",
    }


def _says(content: str, **more: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


_THOUGHT = {"reasoning_content": "Look up.", "thinking": "Look up."}  # templates have either name for it
_SYSTEM, _RAIN = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}
_URI, _IT_RAINS = {"role": "user", "content": "And in Uri?"}, _says("It rains.")

# Each with the definition of the tool, but for the last.
ROWS: dict[str, list[dict[str, Any]]] = {
    "a call": [_RAIN, _calls("Zürich")],
    "two calls at once": [_RAIN, _calls("Zürich", "Uri")],
    "call, result, words": [_RAIN, _calls("Zürich"), _result(), _IT_RAINS],
    "two calls, results, words": [_RAIN, _calls("Bern", "Uri"), _result(), _result(2), _IT_RAINS],
    "a call after a result": [_RAIN, _calls("Bern"), _result(), _calls("Uri"), _result(), _IT_RAINS],
    "a system's words": [_SYSTEM, _RAIN, _calls("Bern"), _result(), _IT_RAINS],
    "words of two turns": [_RAIN, _IT_RAINS, _URI, _says("There, too.")],
    "a call in the second turn": [_RAIN, _IT_RAINS, _URI, _calls("Uri"), _result(), _IT_RAINS],
    "words after a call's turn": [_RAIN, _calls("Bern"), _result(), _IT_RAINS, _URI, _says("There, too.")],
    "a thought": [_RAIN, _says("It rains.", **_THOUGHT)],
    "a thought before a call": [_RAIN, _calls("Bern", **_THOUGHT)],
    "thoughts all the way": [_RAIN, _calls("Bern", **_THOUGHT), _result(), _says("It rains.", **_THOUGHT)],
    "thoughts of two turns": [_RAIN, _says("It rains.", **_THOUGHT), _URI, _says("There, too.", **_THOUGHT)],
    "no tools": [_SYSTEM, _RAIN, _IT_RAINS, _URI, _says("There, too.")],
}


def tools_of(row: str) -> list[dict[str, Any]] | None:
    return None if row == "no tools" else TOOLS
