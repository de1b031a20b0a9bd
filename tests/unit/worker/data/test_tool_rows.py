"""Rows with tools: what is learnt is the assistant's call and its words, never what a tool returned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from mlora_worker.data.errors import DataError
from mlora_worker.data.prepare import prepare
from mlora_worker.data.reading.row_formats import read_rows
from mlora_worker.data.reading.row_types import Chat, Drop, PlainText, Record
from mlora_worker.data.tokenizing.answer_spans import MOST_PROVEN, Mismatch
from mlora_worker.data.tokenizing.chat_template import ChatEncoder
from mlora_worker.protocol import (
    Dataset,
    DatasetFields,
    DatasetFormat,
    FailureReason,
    StorageAccess,
    Training,
    TrainOn,
)
from mlora_worker.storage.remote.dataset_source import open_sources
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.tiny_model import CHATML
from tests.unit.worker.data.conftest import tiny_tokenizer
from tests.unit.worker.data.published_forms import FORMS, tokenizer_of
from tests.unit.worker.data.tool_forms import TOOL_FORMS, ToolForm

TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Rain.", "parameters": {"type": "object"}},
    }
]
FORM = pytest.mark.parametrize("form", TOOL_FORMS, ids=lambda form: form.name)
OWN = pytest.mark.parametrize("own", [False, True], ids=["the model's template", "the task's own"])
ASKED = {"role": "user", "content": "Rain?"}


def calls(city: str = "Bern", **more: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": city, "days": 3}}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]} | more


def result(content: str = "rain, 4 mm") -> dict[str, Any]:
    return {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": content}


def says(content: str = "It rains.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | more


@contextmanager
def encoder(
    form: ToolForm, train_on: TrainOn = TrainOn.ALL_ANSWERS, *, own: bool = False
) -> Iterator[ChatEncoder]:
    made = ChatEncoder(form.tokenizer(), train_on, form.template if own else None)
    try:
        yield made
    finally:
        made.close()


def chat(*messages: dict[str, Any], tools: Any = TOOLS) -> Chat:
    row = {"messages": list(messages), "tools": tools}
    (found,) = read_rows([Record(1, row)], DatasetFormat.MESSAGES, DatasetFields(), "rows")
    assert isinstance(found, Chat)
    return found


def learnt(form: ToolForm, row: Chat | PlainText, made: ChatEncoder) -> list[str] | Drop:
    (found,) = made.encode([row])
    if isinstance(found, Drop):
        return found
    ends = np.flatnonzero(np.diff(found.supervised)) + 1
    parts = zip(np.split(found.ids, ends), np.split(found.supervised, ends), strict=True)
    return [str(form.tokenizer().decode(ids)) for ids, told in parts if told[0]]


@FORM
@OWN
def test_the_call_and_the_words_are_learnt_and_the_result_is_not(form: ToolForm, own: bool) -> None:
    row = chat(ASKED, calls(), result(), says())
    with encoder(form, own=own) as made:
        assert learnt(form, row, made) == [form.call, form.answer]
    with encoder(form, TrainOn.LAST_ANSWER, own=own) as made:
        assert learnt(form, row, made) == [form.answer]


@FORM
def test_a_row_is_rendered_as_transformers_renders_it(form: ToolForm) -> None:
    messages = [ASKED, calls("Zürich"), result("rain"), says("It rains, 4 mm.")]
    tokenizer = form.tokenizer()
    whole = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    with encoder(form) as made:
        (found,) = made.encode([chat(*messages)])
    assert not isinstance(found, Drop)
    # Not by tokens: those before an answer are a server's, and a newline there is not joined to a call.
    assert tokenizer.decode(found.ids) == whole


@FORM
def test_a_conversation_may_end_with_a_call(form: ToolForm) -> None:
    with encoder(form) as made:
        assert learnt(form, chat(ASKED, calls()), made) == [form.call]
        assert learnt(form, chat(ASKED, calls(), result()), made) == [form.call]


@FORM
def test_several_calls_are_learnt_or_the_templates_refusal_is_shown(form: ToolForm) -> None:
    both = calls(tool_calls=[*calls()["tool_calls"], *calls("Uri")["tool_calls"]])
    with encoder(form) as made:
        if form.name == "Llama 3.1":
            with pytest.raises(Exception, match="rejected by the chat template: One call at a time"):
                learnt(form, chat(ASKED, both), made)
        elif not form.several:
            assert learnt(form, chat(ASKED, both), made) is Drop.TOOL_CALLS, "the second is left out"
        else:
            (found,) = learnt(form, chat(ASKED, both), made)
            assert "Bern" in found
            assert "Uri" in found


@FORM
def test_thoughts_in_a_field_are_learnt_or_named(form: ToolForm) -> None:
    row = chat(ASKED, says(reasoning_content="Look at the sky."))
    with encoder(form) as made:
        found = learnt(form, row, made)
    if not form.thoughts:
        assert found is Drop.REASONING
        return
    assert isinstance(found, list)
    assert "Look at the sky." in found[0]
    assert found[0].endswith(form.answer)


@FORM
def test_a_call_that_is_context_is_not_learnt(form: ToolForm) -> None:
    with encoder(form) as made:
        assert learnt(form, chat(ASKED, calls(weight=0), result(), says()), made) == [form.answer]


@FORM
def test_special_tokens_in_arguments_results_and_definitions_are_text(form: ToolForm) -> None:
    end = form.eos
    tools = json.loads(json.dumps(TOOLS).replace("Rain.", f"Rain{end}."))
    row = chat(ASKED, calls(f"Bern{end}"), result(f"rain{end}"), says(), tools=tools)
    with encoder(form) as made:
        (found,) = made.encode([row])
        assert learnt(form, row, made) == [form.call.replace("Bern", f"Bern{end}"), form.answer]
    assert not isinstance(found, Drop)
    assert found.special
    eos = form.tokenizer().eos_token_id
    plain = chat(ASKED, calls(), result(), says())
    with encoder(form) as made:
        (usual,) = made.encode([plain])
    assert not isinstance(usual, Drop)
    assert found.ids.tolist().count(eos) == usual.ids.tolist().count(eos)


def test_what_a_template_leaves_out_drops_the_row_and_is_named() -> None:
    plain = next(form for form in FORMS if form.name == "Qwen2.5")
    made = ChatEncoder(tokenizer_of(plain))
    for row in (
        chat(ASKED, says()),  # the definitions
        chat(ASKED, calls(), tools=None),
        chat(ASKED, calls(content="I look."), result(), says(), tools=None),
    ):
        assert made.encode([row]) == [Drop.TOOL_CALLS]
    assert made.encode([chat(ASKED, says(reasoning="Hm."), tools=None)]) == [Drop.REASONING]
    assert not isinstance(made.encode([chat(ASKED, says(), tools=None)])[0], Drop)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ([ASKED, calls()], "ToolCalls 1 (first in line 1): the chat template leaves out tool calls"),
        (
            [ASKED, says(thinking="Hm.")],
            "Reasoning 1 (first in line 1): the chat template leaves out the thoughts",
        ),
    ],
)
def test_where_all_rows_are_dropped_it_is_said_what_the_template_lacks(row: list[Any], told: str) -> None:
    tokenizer = tiny_tokenizer(
        CHATML, specials=["<|im_start|>", "<|im_end|>", "<|endoftext|>"], eos_token="<|im_end|>"
    )
    dataset = Dataset(inline=json.dumps({"messages": row}), format=DatasetFormat.MESSAGES)
    source = open_sources(MemoryStore(), StorageAccess())
    with pytest.raises(DataError) as caught:
        prepare(dataset, Training(), tokenizer, source, 1000)
    assert caught.value.reason is FailureReason.NO_TRAINABLE_ROWS
    assert told in str(caught.value)
    assert "dataset.chatTemplate" in str(caught.value)


def test_words_that_a_template_leaves_out_beside_a_call_are_named() -> None:
    form = next(form for form in TOOL_FORMS if form.name == "Llama 3.1")
    with encoder(form) as made:
        assert learnt(form, chat(ASKED, calls(content="I look.")), made) is Drop.TEMPLATE_MISMATCH
        assert made.why_mismatched() is Mismatch.WORDS


def test_earlier_thoughts_that_a_template_takes_back_are_named() -> None:
    form = next(form for form in TOOL_FORMS if form.name == "gpt-oss harmony")
    row = chat(ASKED, says(thinking="Hm."), ASKED, says())
    with encoder(form) as made:
        assert learnt(form, row, made) is Drop.TEMPLATE_MISMATCH
        assert made.why_mismatched() is Mismatch.EARLIER
    kept = form.template.replace("loop.last or m.tool_calls", "loop.last or messages[-1].role == 'user'")
    made = ChatEncoder(form.tokenizer(), TrainOn.LAST_ANSWER, kept)
    try:
        assert learnt(form, row, made) is Drop.TEMPLATE_MISMATCH
        assert made.why_mismatched() is Mismatch.CONTEXT
    finally:
        made.close()


@FORM
def test_long_loops_of_calls_are_learnt_up_to_a_bound_that_is_said(form: ToolForm) -> None:
    rounds = [one for _ in range(MOST_PROVEN - 1) for one in (calls(), result())]
    with encoder(form) as made:
        assert learnt(form, chat(ASKED, *rounds, says()), made) == [form.call] * (MOST_PROVEN - 1) + [
            form.answer
        ]
        assert learnt(form, chat(ASKED, *rounds, calls(), result(), says()), made) is Drop.TEMPLATE_MISMATCH
        assert made.why_mismatched() is Mismatch.MANY
    with encoder(form, TrainOn.LAST_ANSWER) as made:
        assert learnt(form, chat(ASKED, *rounds, calls(), result(), says()), made) == [form.answer]


def test_a_template_that_ends_no_call_is_refused() -> None:
    form = TOOL_FORMS[0]
    end = "{{ '<|im_end|>\n' }}{% endif %}"
    endless = form.template.replace(end, "{{ '<|im_end|>\n' if not m.tool_calls else '\nEND' }}{% endif %}")
    assert endless != form.template
    made = ChatEncoder(form.tokenizer(), template=endless)
    try:
        assert learnt(form, chat(ASKED, calls()), made) is Drop.TEMPLATE_MISMATCH
        assert made.why_mismatched() is Mismatch.ENDLESS
    finally:
        made.close()


def test_rows_with_tools_get_the_template_that_is_named_for_them() -> None:
    form = TOOL_FORMS[0]
    tokenizer = form.tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": form.template}
    made = ChatEncoder(tokenizer)
    assert learnt(form, chat(ASKED, calls(), result(), says()), made) == [form.call, form.answer]
    (found,) = made.encode([chat(ASKED, says(), tools=None)])
    assert not isinstance(found, Drop)
    assert "You help." not in tokenizer.decode(found.ids)
