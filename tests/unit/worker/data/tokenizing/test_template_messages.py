"""A chat template that fails tells words of its own source, and never a row: a task's own, and the model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlora_worker.data.errors import DataError
from mlora_worker.data.prepare import prepare
from mlora_worker.data.reading.row_types import Turn
from mlora_worker.data.tokenizing.rendering import ChatTemplate, ConversationRejected
from mlora_worker.data.tokenizing.sandbox import TaskTemplate
from mlora_worker.data.tokenizing.sandboxed_template import OwnTemplate
from mlora_worker.data.tokenizing.template_messages import LONGEST, TemplateMistake
from mlora_worker.protocol import Dataset, StorageAccess, Training
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import open_sources
from tests.fixtures.stories import stories

SECRET = "the_row_holds_4711"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Each tries to tell the first turn's content.
TELLING = {
    "all rows": "{{ raise_exception(messages | tojson) }}",
    "the content": "{{ raise_exception(messages[0].content) }}",
    "after a literal text": "{{ raise_exception('Bad: ' ~ messages[0].content) }}",
    "by +": "{{ raise_exception('Bad: ' + messages[0].content) }}",
    "under another name": "{% set tell = raise_exception %}{{ tell(messages[0].content) }}",
    "in a macro": "{% macro tell(m) %}{{ raise_exception(m) }}{% endmacro %}{{ tell(messages[0].content) }}",
    "by its keyword": "{{ raise_exception(message=messages[0].content) }}",
    "an unknown name of a list": "{{ messages[messages[0].content].more }}",
    "an unknown name of an object": "{{ messages[0][messages[0].content].more }}",
    "a number made of it": "{{ messages[messages[0].content.split('_')[-1] | int].more }}",
    "an attribute": "{{ (messages[0] | attr(messages[0].content)).more }}",
    "a hidden attribute": "{{ (messages[0] | attr('_' ~ messages[0].content)).more }}",
    "a name of a namespace": "{{ namespace(**{'_' ~ messages[0].content: 1}) }}",
    "an unexpected argument": "{{ raise_exception(**{messages[0].content: 1}) }}",
    "an argument of a filter": "{{ 'a' | trim(**{messages[0].content: 1}) }}",
    "a key that is none": "{{ {[messages[0].content]: 1} }}",
    "an attribute of nothing": "{{ (messages | map(attribute=messages[0].content) | first).more }}",
    "a test": "{{ messages | selectattr('content', messages[0].content) | list }}",
    "a method": "{{ messages[0].content.index(messages | tojson) }}",
}


def told_by_own(source: str, content: str = SECRET) -> str:
    with pytest.raises(TemplateMistake) as caught:
        TaskTemplate(source).render([{"role": "user", "content": content}])
    return str(caught.value)


def told_by_models(make_tokenizer: Callable[..., Any], source: str, content: str = SECRET) -> str:
    (answer,) = ChatTemplate(make_tokenizer(source, specials=[])).render([[Turn("user", content)]])
    assert isinstance(answer, ConversationRejected)
    return str(answer)


@pytest.mark.parametrize("story", TELLING)
def test_no_template_tells_a_row(story: str, make_tokenizer: Callable[..., Any]) -> None:
    source = TELLING[story]
    for told in (told_by_own(source), told_by_models(make_tokenizer, source)):
        assert "4711" not in told
        assert "holds" not in told.replace("may contain rows", "")
        assert told, "it still says that the template failed"


def test_what_its_process_tells_is_the_same() -> None:
    for source in TELLING.values():
        with closing(OwnTemplate(source)) as own:
            (answer,) = own.render_all([([{"role": "user", "content": SECRET}], {})])
            assert str(answer) == told_by_own(source)


@settings(max_examples=stories(60), deadline=None)
@given(
    content=st.text(st.characters(codec="utf-8"), max_size=40),
    story=st.sampled_from(sorted({*TELLING} - {"a number made of it"})),
)
def test_no_content_is_told(content: str, story: str) -> None:
    assert "zq9" not in told_by_own(TELLING[story], f"zq9{content}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ raise_exception('Unexpected role: ' ~ messages[0].role) }}", "Unexpected role: ..."),
        ("{{ raise_exception('Got ' + messages[0].role + ', not user') }}", "Got ..., not user"),
        ("{{ raise_exception('A ' 'B') }}", "A B"),
        ("{% set tell = raise_exception %}{{ tell('no') }}{{ raise_exception('no') }}", "no"),
        (
            "a\n\n{{ raise_exception(messages[0].role) }}",
            "line 3: raise_exception with a text that is not shown, since it may contain rows: use a literal text",
        ),
        (
            "a\n{{ messages[0].nothing.more }}",
            "line 2: UndefinedError: 'dict object' has no attribute 'nothing'",
        ),
        ("{{ nothing.more }}", "line 1: UndefinedError: 'nothing' is undefined"),
        ("\n\n{{ messages[7].role.a }}", "line 3: UndefinedError: list object has no element 7"),
        ("{{ messages[0].content + 1 }}", 'line 1: TypeError: can only concatenate str (not "int") to str'),
        ("{{ 1 + messages[0] }}", "line 1: TypeError: unsupported operand type(s) for +: 'int' and 'dict'"),
        ("\n{{ messages[0].content.index('z') }}", "line 2: ValueError"),
    ],
)
def test_its_own_words_and_its_line_are_told(
    source: str, expected: str, make_tokenizer: Callable[..., Any]
) -> None:
    assert told_by_own(source) == expected
    assert told_by_models(make_tokenizer, source) == expected


def test_its_own_words_are_cut() -> None:
    told = told_by_own("{{ raise_exception('" + "x" * 5000 + "') }}")
    assert told == "x" * LONGEST + "..."


def test_a_template_may_give_the_name_another_meaning(make_tokenizer: Callable[..., Any]) -> None:
    source = "{% macro raise_exception(m) %}<{{ m }}>{% endmacro %}{{ raise_exception('x' ~ messages[0].content) }}"
    assert TaskTemplate(source).render([{"role": "user", "content": "y"}]) == "<xy>"
    assert ChatTemplate(make_tokenizer(source, specials=[])).render([[Turn("user", "y")]]) == ["<xy>"]


def test_a_failed_task_says_the_line_and_no_row(make_tokenizer: Callable[..., Any]) -> None:
    source = open_sources(open_store(StorageAccess(), allow_files=True), StorageAccess())
    messages = [{"role": "user", "content": SECRET}, {"role": "assistant", "content": "Yes."}]
    rows = Dataset.model_validate({"format": "messages", "inline": json.dumps({"messages": messages})})
    telling = CHATML + "\n{{ raise_exception(messages | tojson) }}"
    for tokenizer, own in (
        (make_tokenizer(telling, specials=[]), None),
        (make_tokenizer(CHATML, specials=[]), telling),
    ):
        with pytest.raises(
            DataError, match="line 1 was rejected by the chat template: line 5: raise_exc"
        ) as caught:
            prepare(rows, Training(), tokenizer, source, 1000, template=own)
        assert SECRET not in str(caught.value)
