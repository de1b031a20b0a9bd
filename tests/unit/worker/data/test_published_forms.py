"""What is learnt of a row with each supported type's own published form: the answer and its terminator, nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mlora_worker.data.errors import DataError
from mlora_worker.data.prepare import prepare
from mlora_worker.data.reading.row_types import Chat, Drop, Turn
from mlora_worker.data.tokenizing.answer_spans import Mismatch
from mlora_worker.data.tokenizing.chat_template import ChatEncoder, Encoded
from mlora_worker.model.families import FAMILIES
from mlora_worker.protocol import Dataset, DatasetFormat, FailureReason, StorageAccess, Training, TrainOn
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import open_sources
from tests.unit.worker.data.published_forms import DISTINCT, FORMS, Form, tokenizer_of

ROUNDS = (("user", "2?"), ("assistant", "two"), ("user", "4?"), ("assistant", "four"))
THOUGHT = "<think>\nHm.\n</think>\n\ntwo"
NAMES = [form.name for form in DISTINCT]


def learnt(form: Form, *turns: tuple[str, str], train_on: TrainOn = TrainOn.ALL_ANSWERS) -> str | Drop:
    tokenizer = tokenizer_of(form)
    encoder = ChatEncoder(tokenizer, train_on)
    (row,) = encoder.encode([Chat(1, tuple(Turn(*turn) for turn in turns))])
    if isinstance(row, Drop):
        return row
    # Each answer alone: vocabularies of pieces write the space before a word only where one stands before it.
    ends = np.flatnonzero(np.diff(row.supervised)) + 1
    parts = zip(np.split(row.ids, ends), np.split(row.supervised, ends), strict=True)
    return "".join(str(tokenizer.decode(ids)) for ids, told in parts if told[0])


def test_every_supported_type_has_a_published_form_here() -> None:
    assert {form.model_type for form in FORMS} == set(FAMILIES)


@pytest.mark.parametrize("form", DISTINCT, ids=NAMES)
def test_of_a_single_answer_the_answer_and_its_terminator_are_learnt(form: Form) -> None:
    found = learnt(form, *ROUNDS[:2])
    assert found == (form.learnt or Drop.TEMPLATE_MISMATCH)


@pytest.mark.parametrize("form", [form for form in DISTINCT if form.template], ids=lambda form: form.name)
def test_of_a_conversation_every_answer_is_learnt_or_it_is_said_how_the_last_one_can_be(form: Form) -> None:
    found = learnt(form, *ROUNDS)
    if form.both is not None:
        assert found == form.both
    else:
        assert found is Drop.TEMPLATE_MISMATCH
    last = learnt(form, *ROUNDS, train_on=TrainOn.LAST_ANSWER)
    assert last == (form.learnt.replace("two", "four") or Drop.TEMPLATE_MISMATCH)


@pytest.mark.parametrize("form", [form for form in DISTINCT if form.thought], ids=lambda form: form.name)
@pytest.mark.parametrize("written", [THOUGHT, "<think>Hm.</think>two"], ids=["lines", "one line"])
def test_thoughts_of_an_answer_are_learnt_where_the_generation_prompt_ends(form: Form, written: str) -> None:
    found = learnt(form, ("user", "2?"), ("assistant", written))
    assert form.thought is not None
    assert isinstance(found, str)
    assert "".join(found.split()) == "".join(form.thought.split())
    if written == THOUGHT:
        assert found == form.thought


@pytest.mark.parametrize("form", DISTINCT, ids=NAMES)
def test_the_tokens_before_the_answer_are_those_that_a_server_sends(form: Form) -> None:
    tokenizer = tokenizer_of(form)
    answer = THOUGHT if form.thought else "two"
    (row,) = ChatEncoder(tokenizer).encode([Chat(1, (Turn("user", "2?"), Turn("assistant", answer)))])
    assert isinstance(row, Encoded)
    prompt = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "2?"}], tokenize=False, add_generation_prompt=True
        )
        if form.template
        else "2?"
    )
    sent = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert row.ids[: int(row.supervised.argmax())].tolist() == sent


@pytest.mark.parametrize("form", DISTINCT, ids=NAMES)
def test_an_answer_that_ends_in_its_terminator_already_has_it_once(form: Form) -> None:
    answer = THOUGHT if form.thought else "two"
    expected = learnt(form, ("user", "2?"), ("assistant", answer))
    assert isinstance(expected, str)
    terminator = expected[expected.rindex("two") + len("two") :].strip()
    assert expected.count(terminator) == 1
    for ending in (terminator, form.eos, f"{terminator}\n", f"{terminator}{form.eos}"):
        assert learnt(form, ("user", "2?"), ("assistant", answer + ending)) == expected


@pytest.mark.parametrize("form", [form for form in DISTINCT if not form.learnt], ids=lambda form: form.name)
def test_where_a_thought_is_opened_that_answers_lack_the_user_is_told(form: Form) -> None:
    encoder = ChatEncoder(tokenizer_of(form))
    encoder.encode([Chat(1, (Turn("user", "2?"), Turn("assistant", "two")))])
    assert encoder.why_mismatched() is Mismatch.THOUGHT


@pytest.mark.parametrize(
    ("name", "turns", "told"),
    [
        ("Qwen3", ROUNDS, "set dataset.trainOn to lastAnswer"),
        ("GLM-Z1", ROUNDS[:2], "start each answer with <think>...</think>"),
        ("OLMo 3 Think", ROUNDS[:2], "start each answer with <think>...</think>"),
        ("Llama 3", ROUNDS[1:], "put a user's turn before it"),
    ],
)
def test_where_all_rows_are_dropped_it_is_said_what_to_do(
    name: str, turns: tuple[tuple[str, str], ...], told: str
) -> None:
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    dataset = Dataset(inline="\n".join([json.dumps(row)] * 3), format=DatasetFormat.MESSAGES)
    source = open_sources(open_store(StorageAccess(), allow_files=True), StorageAccess())
    tokenizer = tokenizer_of(next(form for form in FORMS if form.name == name))
    with pytest.raises(DataError) as caught:
        prepare(dataset, Training(), tokenizer, source, 100_000)
    assert caught.value.reason is FailureReason.NO_TRAINABLE_ROWS
    assert "TemplateMismatch 3 (first in line 1)" in str(caught.value)
    assert told in str(caught.value)
