"""A task's own chat template: rendered as a model's would be, and bounded where a model's is trusted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from mlora_worker.data.cache import RowCache
from mlora_worker.data.errors import DataError
from mlora_worker.data.prepare import Prepared, prepare
from mlora_worker.data.sandbox import InvalidTemplate, TaskTemplate
from mlora_worker.protocol import Dataset, FailureReason, StorageAccess, Training
from mlora_worker.storage.sources import open_sources
from mlora_worker.storage.store import open_store

SOURCE = open_sources(open_store(StorageAccess(), allow_files=True), StorageAccess())
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}[{{ m['role'] | upper }}] {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[ASSISTANT] {% endif %}"
)
# What templates of models do: namespaces, macros, loop variables, filters, methods, generation markers, slices, tests.
GOOD = {
    "chatml": CHATML,
    "brackets": BRACKETS,
    "namespace": "{% set ns = namespace(n=0, text='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.text = ns.text ~ loop.index ~ ':' ~ m.content ~ '/' ~ loop.length ~ loop.last %}{% endfor %}"
    "{{ ns.n }}{{ ns.text }}",
    "macro": "{% macro turn(m) -%}<{{ m.role }}>{{ m.content | trim }}{%- endmacro %}"
    "{% for m in messages[::-1] %}{{ turn(m) }}{% endfor %}",
    "methods": "{% for m in messages %}{{ m['content'].split('</think>')[-1].lstrip('\n').replace('a', 'bb') }}"
    "{{ m.content.startswith('x') }}{{ m.items() | list | length }}{% endfor %}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}"
    "{{ messages | tojson(indent=2) }}{{ undefined_name | default('none') }}{{ bos_token ~ eos_token }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "numbers": "{{ 7 % 3 }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ [1, 2] + [3] }}{{ (messages | length) * 2 }}",
}
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant")), "content": st.text(max_size=30)}
)


@pytest.mark.parametrize("name", GOOD)
@settings(max_examples=25, deadline=None)
@given(messages=st.lists(TURN, max_size=5), prompt=st.booleans())
def test_it_renders_what_transformers_renders(
    name: str, messages: list[dict[str, str]], prompt: bool
) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": prompt, "tools": None}
    expected = _compile_jinja_template(GOOD[name]).render(messages=messages, **names)
    assert TaskTemplate(GOOD[name]).render(messages, **names) == expected


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", r"line 2: unexpected '}'"),
        ("a\nb\n{% endfor %}", r"line 3: .*endfor"),
        ("{% for m in messages %}", r"line 1: .*end"),
        ("\n{{ 'a' | center(10) }}", r"line 2: the filter center is not among those that may be used"),
        ("{{ 'a' | nothing }}", r"the filter nothing is not among"),
        ("{% include 'x' %}", r"line 1: a chat template cannot load others"),
        ("{% extends 'x' %}", r"a chat template cannot load others"),
        ("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", r"cannot be compiled"),
    ],
)
def test_what_is_wrong_is_told_with_its_line_when_it_is_compiled(source: str, told: str) -> None:
    with pytest.raises(InvalidTemplate, match=told):
        TaskTemplate(source)


SIXTY = "{% set ns = namespace(a=START) %}{% for i in range(60) %}{% set ns.a = NEXT %}{% endfor %}"


def sixty(start: str, following: str) -> str:
    """Each value of the one before."""
    return SIXTY.replace("START", start).replace("NEXT", following)


HOSTILE = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a macro without an end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a text times a number": "{{ 'a' * 999999999 }}",
    "a number times a text": "{{ 999999999 * 'a' }}",
    "a text that doubles": sixty("'ab'", "ns.a + ns.a"),
    "a text that doubles by ~": sixty("'ab'", "ns.a ~ ns.a"),
    "a list that doubles": sixty("[1]", "ns.a + ns.a"),
    "lists in lists": sixty("[1]", "[ns.a, ns.a]") + "{{ ns.a }}",
    "lists in lists as JSON": sixty("[1]", "[ns.a, ns.a]") + "{{ ns.a | tojson }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace by a filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "replace between all": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "join": "{{ ('b' * 100000).join('a' * 100000) }}",
    "join by a filter": "{{ ('a' * 100000) | list | join('b' * 100000) }}",
    "a large number": "{{ 9 ** (9 ** 9) }}",
    "a number that grows": sixty("9", "ns.a * ns.a"),
    "format": "{{ '{:>999999999}'.format('a') }}",
    "format by %": "{{ '%999999999d' % 1 }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "tojson": "{{ [[1]] | tojson(indent=999999) }}",
    "much text of a loop": "{% for i in range(99999) %}" + "x" * 60_000 + "{% endfor %}",
    "much text kept": "{% set a %}{% for i in range(99999) %}" + "x" * 60_000 + "{% endfor %}{% endset %}",
    "the class of a text": "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ x.y }}",
    "nothing of nothing": "{{ undefined_name.attribute }}",
    "a sum of texts": "{{ 'a' + 1 }}",
    "its own refusal": "{{ raise_exception('no') }}",
}  # fmt: skip


@pytest.mark.parametrize("story", HOSTILE)
def test_what_would_take_the_worker_down_ends_soon(story: str) -> None:
    template = TaskTemplate(HOSTILE[story])
    began = time.process_time()
    with pytest.raises(TemplateError):
        template.render([{"role": "user", "content": "hello"}])
    assert time.process_time() - began < 20  # of a machine with little to spare


def test_a_budget_is_one_renderings_and_grows_with_the_conversation() -> None:
    template = TaskTemplate("{% for m in messages %}{{ m.content.replace('a', 'b') }}{% endfor %}")
    long = [{"role": "user", "content": "a" * 2_000_000}] * 3
    for _ in range(3):
        assert template.render(long) == "b" * 6_000_000


# --- in a data set ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer(CHATML, specials=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def bare(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer(None, specials=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")


def run(tokenizer: Any, template: str | None, cache: RowCache | None = None) -> Prepared:
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Four."}]
    dataset = Dataset.model_validate({"format": "messages", "inline": json.dumps({"messages": messages})})
    return prepare(dataset, Training(), tokenizer, SOURCE, 1000, template=template, cache=cache)


def learnt(prepared: Prepared, tokenizer: Any) -> str:
    row = prepared.rows[0]
    return str(tokenizer.decode([label for label in row.labels.tolist() if label >= 0]))


def test_the_tasks_template_takes_the_place_of_the_models(tokenizer: Any, bare: Any) -> None:
    for made in (tokenizer, bare):
        prepared = run(made, BRACKETS)
        assert made.decode(prepared.rows[0].ids) == "[USER] What?<|im_end|>[ASSISTANT] Four.<|im_end|>"
        assert learnt(prepared, made) == "Four.<|im_end|>"
    assert tokenizer.decode(run(tokenizer, None).rows[0].ids).startswith("<|im_start|>user")


def test_rows_whose_answer_it_does_not_show_are_dropped_and_none_is_guessed(tokenizer: Any) -> None:
    hides = BRACKETS.replace(
        "{% if add_generation_prompt %}[ASSISTANT] {% endif %}", "{% if add_generation_prompt %}> {% endif %}"
    )
    with pytest.raises(DataError, match="TemplateMismatch 1") as caught:
        run(tokenizer, hides)
    assert caught.value.reason is FailureReason.NO_TRAINABLE_ROWS


def test_a_template_that_is_none_fails_before_a_row_is_read(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"dataset.chatTemplate: line 2: .*endfor") as caught:
        run(tokenizer, "x\n{% endfor %}")
    assert caught.value.reason is FailureReason.INVALID_SPEC


def test_a_mistake_that_a_row_shows_names_the_row(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"line 1 is refused by the chat template: .*no attribute") as caught:
        run(tokenizer, "{{ messages[0].nothing.more }}")
    assert caught.value.reason is FailureReason.INVALID_ROW


def test_rows_of_one_template_are_never_taken_for_anothers(tokenizer: Any, tmp_path: Path) -> None:
    cache = RowCache(tmp_path, "team-a")
    texts = [
        tokenizer.decode(run(tokenizer, one, cache).rows[0].ids)
        for one in (None, BRACKETS, CHATML, None, BRACKETS)
    ]
    assert texts[0] == texts[2] == texts[3]
    assert texts[1] == texts[4] != texts[0]
    assert len(list(tmp_path.glob("*/*/meta.json"))) == 3
