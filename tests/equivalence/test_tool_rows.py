"""Rows with tools and thoughts have the tokens that TRL trains on, and the answers among them are the ones that it learns.

The templates are those that TRL's package has: the models' own, and those with which it marks what assistants write. Its
marks reach over what a server writes before an answer, and over the line end behind it; ours do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlora_worker.data.reading.row_formats import read_rows
from mlora_worker.data.reading.row_types import Chat, Record
from mlora_worker.data.tokenizing.chat_template import ChatEncoder, Encoded
from mlora_worker.protocol import DatasetFields, DatasetFormat
from tests.unit.worker.data.conftest import tiny_tokenizer

TEMPLATES = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"

_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
TOKENS: dict[str, tuple[tuple[str, ...], str, str | None]] = {
    "qwen2_5": (_IM, "<|im_end|>", None),
    "qwen3": (_IM, "<|im_end|>", None),
    "llama3_1": (_LLAMA, "<|eot_id|>", "<|begin_of_text|>"),
    "gptoss": (_HARMONY, "<|return|>", None),
}
NOT_OURS = {
    "",
    "\n",
    "assistant",
    "assistant\n",
    "<|start|>assistant",
}  # marked by TRL, and not written by a model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Rain.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
ASKED = {"role": "user", "content": "Rain?"}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
CALLS: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "get_weather", "content": "rain, 4 mm"}
SAYS = {"role": "assistant", "content": "It rains."}

ROWS: dict[str, list[dict[str, Any]]] = {
    "a call": [ASKED, CALLS],
    "a call, its result, and words": [ASKED, CALLS, RESULT, SAYS],
    "thoughts": [ASKED, SAYS | {"reasoning_content": "Look up.", "thinking": "Look up."}],
    "thoughts and a call": [ASKED, CALLS | {"reasoning_content": "Ask it.", "thinking": "Ask it."}],
    "thoughts all the way": [
        ASKED, CALLS | {"reasoning_content": "Ask it."}, RESULT, SAYS | {"reasoning_content": "So it is."},
    ],
}  # fmt: skip
CASES = [
    ("qwen2_5", "a call"),
    ("qwen2_5", "a call, its result, and words"),
    ("qwen3", "a call"),
    ("qwen3", "thoughts"),
    ("qwen3", "thoughts and a call"),
    ("qwen3", "thoughts all the way"),
    ("gptoss", "a call"),
    ("gptoss", "a call, its result, and words"),
    ("gptoss", "thoughts"),
    ("gptoss", "thoughts and a call"),
]


def tokenizer_of(name: str) -> Any:
    tokens, eos, bos = TOKENS[name]
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tiny_tokenizer(source, specials=list(tokens), eos_token=eos, bos_token=bos)


def ours(tokenizer: Any, messages: list[dict[str, Any]]) -> Encoded:
    record = Record(1, {"messages": messages, "tools": TOOLS})
    (chat,) = read_rows([record], DatasetFormat.MESSAGES, DatasetFields(), "rows")
    assert isinstance(chat, Chat)
    (found,) = ChatEncoder(tokenizer).encode([chat])
    assert isinstance(found, Encoded)
    return found


@pytest.mark.parametrize(("name", "row"), CASES)
def test_tokens_and_what_is_learnt_of_them_are_those_of_trl(name: str, row: str) -> None:
    tokenizer, messages = tokenizer_of(name), ROWS[row]
    theirs = tokenizer.apply_chat_template(
        messages,
        tools=TOOLS,
        chat_template=(TEMPLATES / f"{name}_training.jinja").read_text(encoding="utf-8"),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    found = ours(tokenizer, messages)
    assert found.ids.tolist() == theirs["input_ids"]
    marked = np.array(theirs["assistant_masks"], np.bool_)
    assert found.supervised.any()
    assert not (found.supervised & ~marked).any()
    beyond = marked & ~found.supervised
    ends = np.flatnonzero(np.diff(beyond)) + 1
    parts = zip(np.split(found.ids, ends), np.split(beyond, ends), strict=True)
    assert {tokenizer.decode(ids) for ids, is_beyond in parts if is_beyond[0]} <= NOT_OURS
    assert "4 mm" not in tokenizer.decode(found.ids[found.supervised])


@pytest.mark.parametrize("row", ["a call", "a call, its result, and words"])
@pytest.mark.parametrize("name", TOKENS)
def test_a_row_has_the_text_that_transformers_gives_it(name: str, row: str) -> None:
    if (name, row) == ("qwen3", "a call, its result, and words"):
        pytest.skip(
            "its call would be rendered with an empty thought at first, and without it later: dropped"
        )
    tokenizer = tokenizer_of(name)
    theirs = tokenizer.apply_chat_template(ROWS[row], tools=TOOLS, tokenize=False)
    assert tokenizer.decode(ours(tokenizer, ROWS[row]).ids) == theirs
