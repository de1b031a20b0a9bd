"""A base model's chat template that is none, or that fails on a row, is the user's to know: with its line, and exit 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mlora_worker.data.errors import DataError
from mlora_worker.data.prepare import Prepared, prepare
from mlora_worker.protocol import Dataset, DatasetFormat, FailureReason, StorageAccess, Training
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import open_sources

SOURCE = open_sources(open_store(StorageAccess(), allow_files=True), StorageAccess())
MESSAGES = {"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "two"}]}
ROWS = {
    DatasetFormat.MESSAGES: MESSAGES,
    DatasetFormat.PROMPT_COMPLETION: {"prompt": "2?", "completion": "two"},
    DatasetFormat.ALPACA: {"instruction": "2?", "output": "two"},
    DatasetFormat.SHAREGPT: {
        "conversations": [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "two"}]
    },
}
SEVERAL = {"tool_use": "{{ messages }}", "rag": "{{ messages }}"}
BROKEN = {
    "an unclosed loop": ("{% for m in messages %}\n{{ m.content }}", "line 2: Unexpected end of template"),
    "an unknown filter": ("\n\n{{ messages | unheard_of }}", "line 3: No filter named 'unheard_of'"),
    "a number that is too long": ("{{ " + "9" * 5000 + " }}", "cannot be compiled: ValueError"),
    "several without a default": (
        SEVERAL,
        r"there are several \(rag, tool_use\), and none of them is named default",
    ),
}


def run(
    tokenizer: Any, *rows: Any, format: DatasetFormat = DatasetFormat.MESSAGES, **options: Any
) -> Prepared:
    inline = "\n".join(map(json.dumps, rows))
    return prepare(Dataset(inline=inline, format=format), Training(), tokenizer, SOURCE, 100_000, **options)


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., Any]) -> Callable[[Any], Any]:
    def made(template: Any) -> Any:
        return make_tokenizer(template, specials=["<eos>", "<|im_end|>"], eos_token="<eos>")

    return made


@pytest.mark.parametrize("format", ROWS)
@pytest.mark.parametrize(("template", "told"), BROKEN.values(), ids=BROKEN)
def test_a_models_template_that_is_none_fails_the_task_in_words(
    tokenizer: Callable[[Any], Any], format: DatasetFormat, template: Any, told: str
) -> None:
    with pytest.raises(DataError, match=told) as caught:
        run(tokenizer(template), ROWS[format], format=format)
    assert caught.value.reason is FailureReason.INVALID_SPEC
    assert "the base model's chat template is invalid" in str(caught.value)
    assert "dataset.chatTemplate" in str(caught.value)


@pytest.mark.parametrize("template", [one for one, _ in BROKEN.values()], ids=BROKEN)
def test_a_task_with_a_template_of_its_own_does_not_need_the_models(
    tokenizer: Callable[[Any], Any], template: Any
) -> None:
    own = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    own += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert run(tokenizer(template), MESSAGES, template=own).counts.used == 1


@pytest.mark.parametrize("template", [None, *(one for one, _ in BROKEN.values())], ids=["none", *BROKEN])
def test_texts_need_no_template_at_all(tokenizer: Callable[[Any], Any], template: Any) -> None:
    prepared = run(tokenizer(template), {"text": "It is four."}, format=DatasetFormat.TEXT)
    (row,) = prepared.rows
    assert tokenizer(None).decode(row.ids) == "It is four.<eos>"


def test_several_templates_with_a_default_are_one(tokenizer: Callable[[Any], Any]) -> None:
    chatml = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    assert run(tokenizer({**SEVERAL, "default": chatml + prompt}), MESSAGES).counts.used == 1


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("m.content + 1", 'line 2: TypeError: can only concatenate str (not "int") to str'),
        ("m.content / 2", "line 2: TypeError"),
        ("1 / 0", "line 2: ZeroDivisionError"),
        ("m.thoughts.text", "line 2: UndefinedError"),
        ("messages[0].content.index(messages[1].content * 9)", "line 2: ValueError"),
    ],
)
def test_an_error_of_an_expression_names_the_row_and_the_templates_line(
    tokenizer: Callable[[Any], Any], expression: str, told: str
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% if m.content == 'odd' %}{{ "
        + expression
        + " }}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    good = [MESSAGES] * 3
    odd = {"messages": [{"role": "user", "content": "odd"}, {"role": "assistant", "content": "two"}]}
    with pytest.raises(DataError) as caught:
        run(tokenizer(template), *good, odd)
    assert caught.value.reason is FailureReason.INVALID_ROW
    assert f"dataset.inline, line 4 was rejected by the chat template: {told}" in str(caught.value)


def test_of_several_rows_that_are_refused_the_first_is_named(tokenizer: Callable[[Any], Any]) -> None:
    """Also where the second is refused by an earlier rendering of it than the first."""
    template = (
        "{% if messages[0].content == 'bad' or (messages | length == 2 and messages[0].content == 'late') %}"
        "{{ raise_exception('not this one') }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    turns = [{"role": role, "content": "two"} for role in ("assistant", "user", "assistant")]
    late = {"messages": [{"role": "user", "content": "late"}, *turns]}
    bad = {"messages": [{"role": "user", "content": "bad"}, *turns]}
    with pytest.raises(DataError, match="line 2 was rejected by the chat template: not this one"):
        run(tokenizer(template), MESSAGES, late, bad)
