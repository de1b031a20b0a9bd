"""Rows with tools and thoughts have the tokens that TRL and Axolotl train on, and the same of them is learnt.

Six published forms of templates and fourteen conversations. TRL's are what its SFTTrainer prepares, with the loss on
assistants alone. Axolotl's were recorded (``axolotl_rows``). Where the three disagree, a table here says how.
"""

from __future__ import annotations

from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from mlora_worker.data.reading.row_formats import read_rows
from mlora_worker.data.reading.row_types import Chat, Drop, Record
from mlora_worker.data.tokenizing.answer_spans import Mismatch
from mlora_worker.data.tokenizing.chat_template import ChatEncoder, Encoded
from mlora_worker.data.tokenizing.conversations import RowRejected
from mlora_worker.protocol import DatasetFields, DatasetFormat, TrainOn
from tests.equivalence.axolotl_rows import learnt_of, recorded
from tests.equivalence.tool_templates import FORM_OF, PUBLISHED, ROWS, Published, tools_of

_THOUGHTS = ("a thought", "a thought before a call", "thoughts all the way", "thoughts of two turns")
_AT_ONCE = ("two calls at once", "two calls, results, words")
_TURNS = ("words of two turns", "a call in the second turn", "words after a call's turn")
_AFTER_A_CALL = (
    "call, result, words",
    "two calls, results, words",
    "a call after a result",
    "a system's words",
)

# Why a row is not trained on as it is; TRL and Axolotl train on what the template shows, or on nothing of it.
NOT_OURS: dict[tuple[str, str], Drop | Mismatch | str] = {
    # These templates leave thoughts out, without a word.
    **{(form, row): Drop.REASONING for form in ("Qwen2.5", "Llama 3.1") for row in _THOUGHTS},
    **{(form, row): Drop.REASONING for form in ("Mistral v3", "Mistral tekken") for row in _THOUGHTS},
    # Qwen3's shows an earlier answer without the empty thought that a model writes there.
    **{("Qwen3", row): Mismatch.EARLIER for row in (*_TURNS, *_AFTER_A_CALL, "thoughts of two turns", "no tools")},
    # Mistral's moves the definitions to the last user's turn: no server has sent what stands before the first answer.
    **{(form, row): Mismatch.EARLIER for form in ("Mistral v3", "Mistral tekken") for row in (*_TURNS, "no tools")},
    **{("Llama 3.1", row): "only supports single tool-calls at once" for row in _AT_ONCE},
    # Of several calls it shows the first one.
    **{("gpt-oss", row): Drop.TOOL_CALLS for row in _AT_ONCE},
    # It takes the thought before a call back once there is a last word, and all thoughts of earlier turns.
    ("gpt-oss", "thoughts all the way"): Mismatch.CONTEXT,
    ("gpt-oss", "thoughts of two turns"): Mismatch.EARLIER,
}  # fmt: skip
# What a server does not send and a model has to write; Axolotl takes it for the template's own.
NOT_AXOLOTLS = {"Qwen3": "<think>\n", "gpt-oss": "<|channel|>"}

CASES = [(form.name, row) for form in PUBLISHED for row in ROWS]
TRAINED = [case for case in CASES if case not in NOT_OURS]


def ours(form: Published, row: str, on: TrainOn = TrainOn.ALL_ANSWERS, own: str | None = None) -> Any:
    """Tokens, or why there are none."""
    record = Record(1, {"messages": ROWS[row], "tools": tools_of(row)})
    (chat,) = read_rows([record], DatasetFormat.MESSAGES, DatasetFields(), "rows")
    assert isinstance(chat, Chat)
    made = ChatEncoder(form.tokenizer(), on, own)
    try:
        (found,) = made.encode([chat])
    except RowRejected as error:
        return str(error)
    finally:
        made.close()
    if found is Drop.TEMPLATE_MISMATCH:
        return made.why_mismatched()
    return found


@cache
def of_trl(form: Published) -> dict[str, tuple[list[int], list[bool]]]:
    """Of each row that the template takes: its tokens, and which of them have a label."""
    tokenizer = form.tokenizer()
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, form.marked
    taken = [row for row in ROWS if not isinstance(NOT_OURS.get((form.name, row)), str)]
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes)),
            args=SFTConfig(
                output_dir=folder, assistant_only_loss=True, max_length=None, report_to="none", use_cpu=True, bf16=False
            ),
            train_dataset=Dataset.from_list([{"messages": ROWS[row], "tools": tools_of(row)} for row in taken]),
            processing_class=tokenizer,
        )  # fmt: skip
    return {
        row: (made["input_ids"], [label != -100 for label in made["labels"]])
        for row, made in zip(taken, trainer.train_dataset, strict=True)
    }


def between(found: Encoded, marked: list[bool], tokenizer: Any) -> set[str]:
    """Texts that are marked and that we do not learn."""
    beyond = np.array(marked) & ~found.supervised
    ends = np.flatnonzero(np.diff(beyond)) + 1
    parts = zip(np.split(found.ids, ends), np.split(beyond, ends), strict=True)
    return {str(tokenizer.decode(ids)) for ids, is_beyond in parts if is_beyond[0]}


@pytest.mark.parametrize(("name", "row"), TRAINED)
def test_tokens_and_what_is_learnt_of_them_are_those_of_trl(name: str, row: str) -> None:
    form = FORM_OF[name]
    found, (ids, marked) = ours(form, row), of_trl(form)[row]
    assert isinstance(found, Encoded), found
    assert found.ids.tolist() == ids
    assert not (found.supervised & ~np.array(marked)).any()
    assert between(found, marked, form.tokenizer()) == set(form.beyond)
    assert " mm" not in form.tokenizer().decode(found.ids[found.supervised])


@pytest.mark.parametrize(("name", "row"), TRAINED)
def test_tokens_and_what_is_learnt_of_them_are_those_of_axolotl(name: str, row: str) -> None:
    theirs, found = recorded()[name][row], ours(FORM_OF[name], row)
    if theirs is None:
        assert name == "gpt-oss"
        assert any(turn["role"] == "tool" for turn in ROWS[row])
        return
    here = learnt_of(found.ids.tolist(), found.supervised.tolist())
    assert here.ids == theirs.ids
    if here.spans == theirs.spans:
        return
    assert here.spans[1::2] == theirs.spans[1::2], "the end of each answer"
    for start, after in zip(here.spans[::2], theirs.spans[::2], strict=True):
        assert start <= after
        lead = FORM_OF[name].tokenizer().decode(found.ids[start:after])
        assert lead.startswith(NOT_AXOLOTLS[name]) or not lead


@pytest.mark.parametrize(("name", "row"), NOT_OURS)
def test_a_row_that_is_not_trained_on_is_named(name: str, row: str) -> None:
    found, why = ours(FORM_OF[name], row), NOT_OURS[name, row]
    assert why in found if isinstance(why, str) else found is why


@pytest.mark.parametrize(("name", "row"), [case for case, why in NOT_OURS.items() if why is Mismatch.EARLIER])
def test_the_last_answer_of_such_a_row_is_what_a_server_would_see(name: str, row: str) -> None:
    form = FORM_OF[name]
    found = ours(form, row, TrainOn.LAST_ANSWER)
    assert isinstance(found, Encoded), found
    tokenizer = form.tokenizer()
    asked = {"tools": tools_of(row), "return_dict": False}
    sent = tokenizer.apply_chat_template(ROWS[row][:-1], add_generation_prompt=True, **asked)
    whole = tokenizer.apply_chat_template(ROWS[row], **asked)
    first = int(found.supervised.argmax())
    assert found.ids[:first].tolist() == sent
    assert tokenizer.decode(found.ids) in (tokenizer.decode(whole), tokenizer.decode(whole).strip())


@pytest.mark.parametrize("row", ROWS)
def test_with_trls_template_for_training_qwen3_learns_every_row_as_there(row: str) -> None:
    form = FORM_OF["Qwen3"]
    found, (ids, marked) = ours(form, row, own=form.marked), of_trl(form)[row]
    assert isinstance(found, Encoded), found
    assert found.ids.tolist() == ids
    assert not (found.supervised & ~np.array(marked)).any()
    assert between(found, marked, form.tokenizer()) == {"\n"}
