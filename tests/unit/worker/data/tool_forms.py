"""Five forms in which models write calls, results and thoughts.

Written for these tests, after what the models' own templates render; each is as short as it can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.unit.worker.data.conftest import tiny_tokenizer

_TOOLS = "{% if tools %}{{ 'Tools: ' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '\n' }}{% endif %}"

_CHATML = (
    "{{ '<|im_start|>system\n' }}" + _TOOLS + "{{ 'You help.<|im_end|>\n' }}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}{{ c.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA = (
    "{{ bos_token }}{% set head = '<|start_header_id|>' %}{% set foot = '<|end_header_id|>\n\n' %}"
    "{{ head + 'system' + foot }}" + _TOOLS + "{{ '<|eot_id|>' }}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ head + 'ipython' + foot }}{{ m.content | tojson }}{{ '<|eot_id|>' }}"
    "{% elif 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('One call at a time') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    "{{ head + 'assistant' + foot + '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson }}"
    "{{ '}<|eot_id|>' }}"
    "{% else %}{{ head + m.role + foot + m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ head + 'assistant' + foot }}{% endif %}"
)
_QWEN3 = _CHATML.replace(
    "+ m.role + '\n' + m.content }}",
    "+ m.role + '\n' }}{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}",
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.first %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}"
    "{{ '[TOOL_RESULTS]{\"content\": ' }}{{ m.content | tojson }}"
    "{{ ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' }}{{ c.function.arguments | tojson }}'
    "{{ ', \"id\": \"' + c.id + '\"}' }}{% endfor %}{{ ']' + eos_token }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
_HARMONY = (
    "{{ '<|start|>developer<|message|>' }}" + _TOOLS + "{{ '<|end|>' }}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}"
    "{% elif m.role != 'assistant' %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{% if m.thinking and (loop.last or m.tool_calls) %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{{ '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}{{ f.arguments | tojson }}"
    "{{ '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


@dataclass(frozen=True)
class ToolForm:
    name: str
    template: str
    tokens: tuple[str, ...]
    eos: str
    call: str  # what is learnt of a call of get_weather with {"city": "Bern", "days": 3}
    answer: str  # and of "It rains."
    bos: str | None = None
    thoughts: bool = False
    several: bool = True  # calls in one turn

    def tokenizer(self) -> Any:
        return tiny_tokenizer(
            self.template, specials=list(self.tokens), eos_token=self.eos, bos_token=self.bos
        )


_ARGUMENTS = '{"city": "Bern", "days": 3}'
_JSON = f'<tool_call>\n{{"name": "get_weather", "arguments": {_ARGUMENTS}}}\n</tool_call><|im_end|>'
_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")

TOOL_FORMS = (
    ToolForm("ChatML with tools", _CHATML, _IM, "<|im_end|>", _JSON, "It rains.<|im_end|>"),
    ToolForm(
        "Llama 3.1", _LLAMA, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>", f'{{"name": "get_weather", "parameters": {_ARGUMENTS}}}<|eot_id|>', "It rains.<|eot_id|>",
        bos="<|begin_of_text|>", several=False,
    ),
    ToolForm("Qwen3", _QWEN3, (*_IM, "<think>", "</think>"), "<|im_end|>", _JSON, "It rains.<|im_end|>", thoughts=True),
    ToolForm(
        "Mistral", _MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_ARGUMENTS}, "id": "call00001"}}]</s>',
        "It rains.</s>", bos="<s>",
    ),
    ToolForm(
        "gpt-oss harmony", _HARMONY, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        "<|return|>", f" to=functions.get_weather<|channel|>commentary json<|message|>{_ARGUMENTS}<|call|>",
        "<|channel|>final<|message|>It rains.<|return|>", thoughts=True, several=False,
    ),
)  # fmt: skip
