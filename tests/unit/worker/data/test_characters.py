"""A character of several tokens, and tokenizers that say odd things of places: what is learnt is whole all the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import processors

from mlora_worker.data.reading.row_types import Chat, Drop, PlainText, Turn
from mlora_worker.data.tokenizing.chat_template import ChatEncoder, Encoded
from tests.unit.worker.data.published_forms import FORMS, Form, tokenizer_of

MakeTokenizer = Callable[..., Any]

LAST = ("ok €", "ok 😀", "是。", "well…", "é", "नमस्ते", "👩‍👩‍👧", "€€")
CLOSED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}CLOSER\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
BY_NAME = {form.name: form for form in FORMS}


def learnt(tokenizer: Any, *turns: tuple[str, str]) -> list[int]:
    (row,) = ChatEncoder(tokenizer).encode([Chat(1, tuple(Turn(*turn) for turn in turns))])
    assert isinstance(row, Encoded), row
    return [int(token) for token in row.ids[row.supervised]]


@pytest.mark.parametrize("answer", LAST)
@pytest.mark.parametrize(
    "form",
    [
        *map(BY_NAME.__getitem__, ("GPT-2", "Qwen2.5", "ERNIE 4.5", "Llama 2")),
        dataclasses.replace(BY_NAME["GPT-2"], name="pieces and bytes", vocabulary="pieces"),
    ],
    ids=lambda form: form.name,
)
def test_all_tokens_of_an_answers_last_character_are_learnt(form: Form, answer: str) -> None:
    tokenizer = tokenizer_of(form)
    assert len(tokenizer.tokenize(answer[-1])) > 1, "or this test shows nothing"
    found = learnt(tokenizer, ("user", "2?"), ("assistant", answer))
    assert tokenizer.decode(found) == form.learnt.replace("two", answer)


@pytest.mark.parametrize("answer", LAST)
def test_all_tokens_of_an_answers_first_character_are_learnt(answer: str) -> None:
    turned = answer[::-1] if "\u200d" not in answer else answer
    for name in ("GPT-2", "Qwen2.5"):
        tokenizer = tokenizer_of(BY_NAME[name])
        found = learnt(tokenizer, ("user", "€"), ("assistant", f"{turned} ok"))
        assert tokenizer.decode(found) == BY_NAME[name].learnt.replace("two", f"{turned} ok")


@pytest.mark.parametrize("closer", ["。", "…", "😀", " 。", "é"])
def test_a_turn_that_is_closed_with_such_a_character_has_it_learnt(
    make_tokenizer: MakeTokenizer, closer: str
) -> None:
    template = CLOSED.replace("CLOSER", closer)
    tokenizer = make_tokenizer(template, specials=["<eos>"], eos_token="<eos>")
    one = learnt(tokenizer, ("user", "2?"), ("assistant", "two"))
    assert tokenizer.decode(one) == f"two{closer}"
    both = learnt(tokenizer, ("user", "2?"), ("assistant", "two"), ("user", "4?"), ("assistant", "four€"))
    assert tokenizer.decode(both) == f"two{closer}four€{closer}"


def test_a_tokenizer_that_leaves_spaces_out_of_its_places_is_no_hindrance(
    make_tokenizer: MakeTokenizer,
) -> None:
    """As the byte-level tokenizers of GPT-NeoX do."""
    template = "{% for m in messages %}{{ m.role }}:\n{{ m.content }} <eos> {% endfor %}assistant:\n"
    for text, expected in (("two", "two <eos>"), (" two  ", " two   <eos>")):
        tokenizer = make_tokenizer(template, specials=["<eos>"], eos_token="<eos>")
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        tokenizer.chat_template = template.replace(
            "assistant:\n", "{% if add_generation_prompt %}assistant:\n{% endif %}"
        )
        rounds = (("user", "2? "), ("assistant", text), ("user", " 4?"), ("assistant", text))
        assert tokenizer.decode(learnt(tokenizer, *rounds)) == expected * 2
    plain = make_tokenizer(None, specials=["<eos>"], eos_token="<eos>")
    plain.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert plain.decode(learnt(plain, ("user", "2? "), ("assistant", " two  "))) == " two  <eos>"


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("", "two"),
        ("Answer: ", "the answer"),
        ("Answer:", " the answer"),
        ("\n", "\n\ntwo"),
        ("the", " answer "),
        ("€", "€"),
    ],
)
def test_without_a_template_the_prompt_has_the_tokens_that_it_has_alone(prompt: str, completion: str) -> None:
    tokenizer = tokenizer_of(BY_NAME["GPT-2"])
    (row,) = ChatEncoder(tokenizer).encode([Chat(1, (Turn("user", prompt), Turn("assistant", completion)))])
    assert isinstance(row, Encoded)
    sent = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert row.ids[~row.supervised].tolist() == sent
    assert tokenizer.decode(row.ids[row.supervised]) == f"{completion}<|endoftext|>"


def test_rows_that_share_their_first_answer_keep_it() -> None:
    """As examples that stand before each question."""
    form = BY_NAME["Qwen2.5"]
    tokenizer = tokenizer_of(form)
    shared = (Turn("user", "2?"), Turn("assistant", "two"))
    chats = [Chat(n, (*shared, Turn("user", f"{n}?"), Turn("assistant", "four"))) for n in range(5)]
    encoder = ChatEncoder(tokenizer)
    for row in [*encoder.encode(chats), *encoder.encode(chats)]:
        assert isinstance(row, Encoded)
        assert tokenizer.decode(row.ids[row.supervised]) == form.both


@pytest.mark.parametrize(
    "ending", ["<|endoftext|>", "<|endoftext|>\n", "<|endoftext|><|endoftext|>", " <|endoftext|>"]
)
def test_without_a_template_too_the_end_token_is_learnt_once(ending: str) -> None:
    tokenizer = tokenizer_of(BY_NAME["GPT-2"])
    eos = tokenizer.eos_token_id
    one, two = ChatEncoder(tokenizer).encode(
        [
            PlainText(1, f"It is two.{ending}"),
            Chat(2, (Turn("user", "2?"), Turn("assistant", f" two{ending}"))),
        ]
    )
    for row in (one, two):
        assert isinstance(row, Encoded)
        assert row.ids.tolist().count(eos) == 1
        assert row.ids[-1] == eos
    empty = ChatEncoder(tokenizer).encode(
        [PlainText(1, ending), Chat(2, (Turn("user", "2?"), Turn("assistant", ending)))]
    )
    assert empty == [Drop.EMPTY_TEXT, Drop.NO_ANSWER]


def test_an_answer_that_is_its_turns_end_alone_is_no_answer() -> None:
    tokenizer = tokenizer_of(BY_NAME["Qwen2.5"])
    assert ChatEncoder(tokenizer).encode(
        [Chat(1, (Turn("user", "2?"), Turn("assistant", " <|im_end|>\n")))]
    ) == [Drop.NO_ANSWER]
