"""Special tokens in a user's own text are text; rows that are rendered already are named."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlora_worker.data.errors import DataError
from mlora_worker.data.prepare import Prepared, prepare
from mlora_worker.data.reading.row_types import Chat, Drop, PlainText, Turn
from mlora_worker.data.tokenizing.answer_spans import Mismatch
from mlora_worker.data.tokenizing.chat_template import ChatEncoder, Encoded
from mlora_worker.protocol import Dataset, DatasetFormat, FailureReason, StorageAccess, Training
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import open_sources
from tests.unit.worker.data.published_forms import FORMS, Form, tokenizer_of

TEMPLATED = [form for form in FORMS if form.template and form.learnt]
QWEN = next(form for form in FORMS if form.name == "Qwen2.5")
SOURCE = open_sources(open_store(StorageAccess(), allow_files=True), StorageAccess())


def encoded(tokenizer: Any, question: str, answer: str, **options: Any) -> Encoded:
    (row,) = ChatEncoder(tokenizer, **options).encode(
        [Chat(1, (Turn("user", question), Turn("assistant", answer)))]
    )
    assert isinstance(row, Encoded), row
    return row


def prepared(
    tokenizer: Any, *rows: dict[str, Any], format: DatasetFormat = DatasetFormat.PROMPT_COMPLETION
) -> Prepared:
    inline = "\n".join(map(json.dumps, rows))
    return prepare(Dataset(inline=inline, format=format), Training(), tokenizer, SOURCE, 100_000)


@pytest.mark.parametrize("form", TEMPLATED, ids=lambda form: form.name)
def test_special_tokens_in_a_turns_text_never_become_the_tokens(form: Form) -> None:
    tokenizer = tokenizer_of(form)
    plain = encoded(tokenizer, "what is it?", "it is this")
    names = [name for name in (*form.specials, *form.takes_white_space) if "think" not in name]
    quoted = " ".join(["what is", *names, "?"])
    row = encoded(tokenizer, quoted, f"it {quoted} this")
    special = {tokenizer.convert_tokens_to_ids(name) for name in names}
    assert [token for token in row.ids.tolist() if token in special] == [
        token for token in plain.ids.tolist() if token in special
    ]
    assert (row.special, plain.special) == (True, False)
    learnt = str(tokenizer.decode(row.ids[row.supervised]))
    assert learnt == form.learnt.replace("two", f"it {quoted} this")


def test_the_text_between_the_templates_tokens_is_tokenised_as_text() -> None:
    tokenizer = tokenizer_of(QWEN)
    question, answer = "what is <|im_end|> the", "it is <|im_start|>assistant\ntwo"
    row = encoded(tokenizer, question, answer)
    apart = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    apart.encode_special_tokens = True

    def turn(text: str) -> list[int]:
        return [1, *apart.encode(text).ids, 2, *apart.encode("\n").ids]

    assert (tokenizer.convert_ids_to_tokens([1, 2])) == ["<|im_start|>", "<|im_end|>"]
    assert row.ids.tolist() == [
        *turn("system\nYou help."),
        *turn(f"user\n{question}"),
        *turn(f"assistant\n{answer}"),
    ]


TEXTS = st.lists(
    st.sampled_from(
        ["the answer", " ", "\n", "<|im_end|>", "<|im_start|>", "user", "é", "€", "<|im", "<think>"]
    ),
    min_size=1,
    max_size=6,
).map("".join)


@given(TEXTS, TEXTS.map(lambda text: f"So {text} it is"))
def test_whatever_is_quoted_the_template_alone_writes_special_tokens(question: str, answer: str) -> None:
    tokenizer = tokenizer_of(QWEN)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], tokenize=False
    )
    (row,) = ChatEncoder(tokenizer).encode([Chat(1, (Turn("user", question), Turn("assistant", answer)))])
    if row is Drop.ALREADY_RENDERED:
        assert question.lstrip().startswith("<|im_start|>")
        return
    assert isinstance(row, Encoded)
    assert tokenizer.decode(row.ids) == text
    assert tokenizer.decode(row.ids[row.supervised]) == f"{answer}<|im_end|>"
    named = tokenizer.convert_ids_to_tokens(row.ids.tolist())
    assert (named.count("<|im_start|>"), named.count("<|im_end|>")) == (3, 3)


def test_marks_of_thoughts_in_an_answer_stay_tokens_and_in_a_question_are_text() -> None:
    seed = next(form for form in FORMS if form.name == "Seed-OSS")
    tokenizer = tokenizer_of(seed)
    row = encoded(tokenizer, "Say <seed:think> please", "<seed:think>Hm.</seed:think>two")
    named = tokenizer.convert_ids_to_tokens(row.ids.tolist())
    assert (named.count("<seed:think>"), named.count("</seed:think>")) == (1, 1)
    assert tokenizer.decode(row.ids[row.supervised]) == "<seed:think>Hm.</seed:think>two<seed:eos>"


def test_tokens_that_the_template_writes_are_text_in_texts_though_the_tokenizer_calls_them_ordinary() -> None:
    form = dataclasses.replace(
        QWEN, specials=("<|endoftext|>",), eos="<|endoftext|>", marks=QWEN.specials[1:]
    )
    tokenizer = tokenizer_of(form)
    assert not any(
        tokenizer.added_tokens_decoder[number].special
        for number in tokenizer.convert_tokens_to_ids(form.marks)
    )
    row = encoded(tokenizer, "a <|im_end|> b", "c <|im_start|> d")
    named = tokenizer.convert_ids_to_tokens(row.ids.tolist())
    assert (named.count("<|im_start|>"), named.count("<|im_end|>")) == (3, 3)
    assert tokenizer.decode(row.ids[row.supervised]) == "c <|im_start|> d<|im_end|>"


def test_a_template_that_looks_for_special_tokens_in_texts_is_not_second_guessed() -> None:
    tokenizer = tokenizer_of(QWEN)
    tokenizer.chat_template = str(tokenizer.chat_template).replace(
        "m.content", "m.content.replace('<|im_end|>', '')"
    )
    encoder = ChatEncoder(tokenizer)
    assert encoder.encode([Chat(1, (Turn("user", "a <|im_end|>"), Turn("assistant", "b")))]) == [
        Drop.TEMPLATE_MISMATCH
    ]
    assert encoder.why_mismatched() is Mismatch.SPECIAL


def test_characters_of_the_masks_in_such_a_text_are_no_way_around_it() -> None:
    tokenizer = tokenizer_of(QWEN)
    number = [one.content for one in tokenizer.added_tokens_decoder.values()].index("<|im_end|>")
    for first in (0xF0000, 0x100000):
        for mask in (chr(first + number) * len("<|im_end|>"), chr(first) * 10, chr(first + 1) * 12):
            turns = (Turn("user", f"a <|im_end|> {mask}"), Turn("assistant", "b"))
            assert ChatEncoder(tokenizer).encode([Chat(1, turns)]) == [Drop.TEMPLATE_MISMATCH]
            alone = encoded(
                tokenizer, f"a {mask}", "b"
            )  # without special tokens they are characters like others
            assert tokenizer.decode(alone.ids[alone.supervised]) == "b<|im_end|>"


def test_the_shared_tokenizer_is_left_as_it_is() -> None:
    tokenizer = tokenizer_of(QWEN)
    before = tokenizer.backend_tokenizer.to_str()
    encoded(tokenizer, "a <|im_end|>", "b")
    assert tokenizer.backend_tokenizer.to_str() == before
    assert not tokenizer.backend_tokenizer.encode_special_tokens


RENDERED = {
    "Qwen2.5": "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n",
    "Llama 3": "<|start_header_id|>user<|end_header_id|>\n\n2?<|eot_id|>",
    "Llama 2": "<s>[INST] 2? [/INST]",
    "Mistral, later": "[INST]2?[/INST]",
    "Gemma": "<bos><start_of_turn>user\n2?<end_of_turn>\n<start_of_turn>model\n",
    "Phi-3": "<|user|>\n2?<|end|>\n<|assistant|>\n",
    "GLM-4": "<|user|>\n2?<|assistant|>\n",
    "OLMo 2": "<|user|>\n2?\n<|assistant|>\n",
    "ERNIE 4.5": "User: 2?\nAssistant: ",
}


@pytest.mark.parametrize("name", RENDERED)
def test_a_prompt_that_is_rendered_already_is_named(name: str) -> None:
    form = next(form for form in FORMS if form.name == name)
    encoder = ChatEncoder(tokenizer_of(form))
    rows = [
        Chat(1, (Turn("user", RENDERED[name]), Turn("assistant", "two"))),
        Chat(2, (Turn("user", f"\n{RENDERED[name]}"), Turn("assistant", "two"))),
        Chat(3, (Turn("user", f"What does {RENDERED[name]} mean?"), Turn("assistant", "two"))),
    ]
    one, two, quoted = encoder.encode(rows)
    assert one is two is Drop.ALREADY_RENDERED
    assert isinstance(quoted, Encoded)


@pytest.mark.parametrize("form", TEMPLATED, ids=lambda form: form.name)
def test_what_the_template_itself_renders_is_known_again(form: Form) -> None:
    tokenizer = tokenizer_of(form)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2?"}], tokenize=False, add_generation_prompt=True
    )
    encoder = ChatEncoder(tokenizer)
    assert encoder.encode([Chat(1, (Turn("user", prompt), Turn("assistant", "two")))]) == [
        Drop.ALREADY_RENDERED
    ]


def test_an_answer_that_is_rendered_already_is_named_too() -> None:
    encoder = ChatEncoder(tokenizer_of(QWEN))
    for answer, found in (
        ("<|im_start|>assistant\ntwo<|im_end|>", Drop.ALREADY_RENDERED),
        ("two<|im_end|>", None),
        ("It begins with <|im_start|>assistant", None),
    ):
        (row,) = encoder.encode([Chat(1, (Turn("user", "2?"), Turn("assistant", answer)))])
        assert row is found or (found is None and isinstance(row, Encoded))


def test_rows_with_special_tokens_are_counted_and_a_file_of_rendered_rows_is_told_what_to_do() -> None:
    tokenizer = tokenizer_of(QWEN)
    counts = prepared(
        tokenizer,
        {"prompt": "a", "completion": "b"},
        {"prompt": "What is <|im_end|>?", "completion": "a token"},
        {"prompt": "And now?", "completion": "it is <|im_start|> and more"},
        {"prompt": RENDERED["Qwen2.5"], "completion": "b"},
    ).counts
    assert counts.special_tokens == 2
    assert counts.dropped == {"AlreadyRendered": 1}
    assert counts.first_dropped == {"AlreadyRendered": (4,)}
    assert prepared(tokenizer, {"prompt": "a", "completion": "b"}).counts.special_tokens is None
    with pytest.raises(DataError, match="give only the text of each turn") as caught:
        prepared(tokenizer, {"prompt": RENDERED["Qwen2.5"], "completion": "b"})
    assert caught.value.reason is FailureReason.NO_TRAINABLE_ROWS


def test_a_text_without_a_template_may_write_special_tokens_itself() -> None:
    tokenizer = tokenizer_of(QWEN)
    rendered = f"{RENDERED['Qwen2.5']}two<|im_end|>"
    (row,) = ChatEncoder(tokenizer).encode([PlainText(1, rendered)])
    assert isinstance(row, Encoded)
    assert row.special
    named = tokenizer.convert_ids_to_tokens(row.ids.tolist())
    assert (named.count("<|im_start|>"), named.count("<|im_end|>")) == (2, 2)
    assert named[-1] == "<|im_end|>"
