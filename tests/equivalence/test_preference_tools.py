"""Preferences whose prompts and answers have tools, calls and thoughts become the tokens of TRL's own trainers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlora_worker.data.reading.row_formats import read_rows
from mlora_worker.data.reading.row_types import Drop, Record
from mlora_worker.data.tokenizing.chat_template import ChatEncoder
from mlora_worker.data.tokenizing.tokenize import EncodedPair, EncodedUnpaired, encoded_rows
from mlora_worker.protocol import DatasetFields, DatasetFormat
from tests.equivalence.tool_templates import FORM_OF, TOOLS
from tests.equivalence.trl_trainers import answers_of_trl, rows_of_trl
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

Turns = list[dict[str, Any]]
Sequences = list[tuple[list[int], list[int]]]  # of each its prompt, and what is compared

ASKED = {"role": "user", "content": "Rain?"}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Bern"}},
}
CALLS: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "rain, 4 mm"}
SAYS, OTHER = {"role": "assistant", "content": "It rains."}, {"role": "assistant", "content": "No idea."}

# Prompt and answer.
ROWS: dict[str, tuple[Turns, Turns]] = {
    "a call": ([ASKED], [CALLS]),
    "words after a call in the prompt": ([ASKED, CALLS, RESULT], [SAYS]),
    "a call, its result, and words": ([ASKED], [CALLS, RESULT, SAYS]),
    "thoughts": ([ASKED], [SAYS | {"reasoning_content": "Look up.", "thinking": "Look up."}]),
}
CASES = [
    *(("Qwen2.5", row) for row in list(ROWS)[:3]),
    ("Qwen3", "a call"),
    ("Qwen3", "words after a call in the prompt"),
    ("Qwen3", "thoughts"),
    ("gpt-oss", "a call"),
    ("gpt-oss", "words after a call in the prompt"),
    ("gpt-oss", "thoughts"),
]


def rows_of(row: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """As a pair, and as an answer with a label."""
    prompt, answer = ROWS[row]
    pair = {"prompt": prompt, "chosen": answer, "rejected": [OTHER], "tools": TOOLS}
    return pair, {"prompt": prompt, "completion": answer, "label": True, "tools": TOOLS}


def ours(tokenizer: Any, row: dict[str, Any]) -> Sequences | Drop:
    kind = DatasetFormat.PREFERENCE if "chosen" in row else DatasetFormat.UNPAIRED_PREFERENCE
    rows = read_rows([Record(1, row)], kind, DatasetFields(), "rows")
    ((_, made),) = encoded_rows(rows, ChatEncoder(tokenizer))
    if isinstance(made, Drop):
        return made
    assert isinstance(made, EncodedPair | EncodedUnpaired)
    found = []
    for one in made if isinstance(made, EncodedPair) else [made.answer]:
        first = int(np.argmax(one.supervised))
        assert one.supervised[first:].all()
        found.append((one.ids[:first].tolist(), one.ids[first:].tolist()))
    return found


@pytest.mark.parametrize(("name", "row"), CASES)
def test_tokens_and_what_is_compared_are_those_of_trl(name: str, row: str) -> None:
    tokenizer, (pair, single) = FORM_OF[name].tokenizer(), rows_of(row)
    (theirs,), (answer,) = rows_of_trl([pair], tokenizer, 4096), answers_of_trl([single], tokenizer, 4096)
    prompt = theirs["prompt_ids"]
    assert ours(tokenizer, pair) == [(prompt, theirs["chosen_ids"]), (prompt, theirs["rejected_ids"])]
    assert ours(tokenizer, single) == [(answer["prompt_ids"], answer["completion_ids"])]


@pytest.mark.parametrize("row", ["a call", "words after a call in the prompt"])
def test_where_tokens_reach_over_the_prompts_end_it_is_as_a_server_sends_it(row: str) -> None:
    """TRL leaves the line ends at the prompt's end out there. The text is the same."""
    tokenizer, (prompt, answer) = FORM_OF["Llama 3.1"].tokenizer(), ROWS[row]
    found = ours(tokenizer, rows_of(row)[1])
    assert not isinstance(found, Drop)
    ((before, after),) = found
    assert (
        before == tokenizer.apply_chat_template(prompt, tools=TOOLS, add_generation_prompt=True)["input_ids"]
    )
    whole = tokenizer.apply_chat_template(prompt + answer, tools=TOOLS, tokenize=False)
    assert tokenizer.decode(before + after) == whole


@pytest.mark.parametrize(("row", "rule"), [("a call", Drop.TOOL_CALLS), ("thoughts", Drop.REASONING)])
def test_what_a_template_leaves_out_is_dropped_by_its_name(row: str, rule: Drop) -> None:
    words = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    tokenizer = tiny_tokenizer(
        words + "{% if add_generation_prompt %}<assistant>{% endif %}",
        specials=["<end>", "<assistant>"],
        eos_token="<end>",
    )
    for one in rows_of(row):
        assert ours(tokenizer, {**one, "tools": []}) is rule
    assert (
        ours(tokenizer, rows_of("thoughts")[1] | {"completion": [OTHER]}) is Drop.TOOL_CALLS
    )  # the tools themselves
