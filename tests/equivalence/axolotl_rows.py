"""What Axolotl learns of the rows in ``tool_templates``, written to ``axolotl_rows.json``.

    PYTHONPATH=...:FOLDER python -m tests.equivalence.axolotl_rows

where FOLDER is what ``pip install --no-deps --target FOLDER axolotl colorama addict`` has made: its other dependencies do
not resolve beside this project's, and what it does with rows needs none of them.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.equivalence.tool_templates import PUBLISHED, ROWS, Published, tools_of

FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Learnt:
    """``ids``: the digest of all tokens. ``spans``: first and last but one of what is learnt, in pairs."""

    ids: str
    spans: list[int]


def learnt_of(ids: Sequence[int], is_learnt: Sequence[bool]) -> Learnt:
    before = [False, *is_learnt]
    spans = [at for at, now in enumerate([*is_learnt, False]) if now != before[at]]
    return Learnt(hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16], spans)


def recorded() -> dict[str, dict[str, Learnt | None]]:
    """By form and row. None: Axolotl cannot train on it."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    return {
        form: {row: None if found is None else Learnt(**found) for row, found in own.items()}
        for form, own in rows.items()
    }


def _learnt(form: Published, row: str) -> Learnt | None:
    """As ``chat_template`` with ``roles_to_train: [assistant]``, ``train_on_eos: turn`` and the ends as ``eot_tokens``.
    None: it cannot train on the row."""
    from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter, ChatTemplateStrategy

    tokenizer = form.tokenizer()
    prompter = ChatTemplatePrompter(
        tokenizer,
        chat_template=form.as_served,
        message_property_mappings={"role": "role", "content": "content"},
    )
    strategy = ChatTemplateStrategy(
        prompter,
        tokenizer=tokenizer,
        train_on_inputs=False,
        sequence_len=4096,
        roles_to_train=["assistant"],
        train_on_eos="turn",
        eot_tokens=[form.eos, *form.ends],
    )
    given: dict[str, Any] = {"messages": copy.deepcopy(ROWS[row])}
    if tools_of(row) is not None:
        given["tools"] = copy.deepcopy(tools_of(row))
    try:
        made = strategy.tokenize_prompt(given)
    except Exception as error:  # the template's, of a rendering that it makes up
        print(f"{form.name}, {row}: {error}")
        return None
    return learnt_of(made["input_ids"], [label != -100 for label in made["labels"]])


def main() -> None:
    logging.disable(logging.CRITICAL)
    found = {form.name: {row: _learnt(form, row) for row in ROWS} for form in PUBLISHED}
    rows = {
        form: {row: None if one is None else asdict(one) for row, one in own.items()}
        for form, own in found.items()
    }
    text = json.dumps({"axolotl": version("axolotl"), "rows": rows}, indent=1)
    FILE.write_text(
        re.sub(r"\[[\d,\s]*\]", lambda span: " ".join(span[0].split()), text) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
