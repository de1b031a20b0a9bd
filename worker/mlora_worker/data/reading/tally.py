"""What became of the rows, as users see it, and what to do where none is left."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from mlora_worker.data.errors import DataError
from mlora_worker.data.reading.row_types import Drop
from mlora_worker.data.training_rows.token_rows import TokenRows
from mlora_worker.protocol import LONGEST_FILE, DataCounts, FailureReason

FIRST_LINES = 10  # of dropped rows that are named per rule

_ADVICE = {
    Drop.NO_ANSWER: "the answers are empty, or not those of an assistant: a conversation, and each of the two answers "
    "of a pair, must end with an assistant's turn that has text; check dataset.fields and the file",
    Drop.EMPTY_TEXT: "the texts are empty: check dataset.fields and the file",
    Drop.TOOL_CALLS: "the chat template leaves out tool calls, their results or the tools: use a model whose template "
    "writes them, or set dataset.chatTemplate",
    Drop.REASONING: "the chat template leaves out the thoughts of answers (reasoning_content): put them into the content, "
    "in the model's own format, or set dataset.chatTemplate",
    Drop.ALREADY_RENDERED: "turns already contain the markup of the chat template, which would be added "
    "a second time: give only the text of each turn, or rendered rows with dataset.format text",
    Drop.TEMPLATE_MISMATCH: "the tokens of the answer cannot be found in the output of the chat template",
    Drop.ZERO_WEIGHT: "all weights are 0: check dataset.fields.weight",
    Drop.TOO_LONG: "raise training.maxSeqLength or set training.overlong to truncate",
    Drop.EQUAL_ANSWERS: "the chosen and the rejected answer are the same, so none is preferred: check dataset.fields and "
    "the file, and raise training.maxSeqLength where it cuts answers off before they differ",
    Drop.NO_SUPERVISED_TOKENS: "training.maxSeqLength cuts off every answer: raise it",
}


class Tally:
    def __init__(self) -> None:
        self.used = 0
        self.truncated = 0
        self.special = 0
        self._dropped: Counter[str] = Counter()
        self._first: defaultdict[str, list[int]] = defaultdict(list)
        self._first_in: defaultdict[str, list[str]] = defaultdict(list)

    def drop(self, rule: Drop, line: int, file: str | None = None) -> None:
        """``file``: which it is, of several."""
        self._dropped[rule.value] += 1
        if len(self._first[rule.value]) < FIRST_LINES:
            self._first[rule.value].append(line)
            if file is not None:
                self._first_in[rule.value].append(file[:LONGEST_FILE])

    def use(self, *, truncated: bool, special: bool) -> None:
        self.used += 1
        self.truncated += truncated
        self.special += special

    @property
    def read(self) -> int:
        return self.used + self._dropped.total()

    def counts(self, rows: TokenRows) -> DataCounts:
        return DataCounts(
            rows=self.read,
            used=len(rows),
            dropped=dict(self._dropped),
            first_dropped={rule: tuple(lines) for rule, lines in self._first.items()},
            first_dropped_in={rule: tuple(files) for rule, files in self._first_in.items()} or None,
            truncated=self.truncated,
            special_tokens=self.special or None,
            **_tokens(rows),
        )


def selected_counts(all_rows: DataCounts, train: TokenRows, held_out: int, beyond: int) -> DataCounts:
    """Counts of what is trained on, when ``all_rows`` are those of the usable rows together."""
    return all_rows.model_copy(
        update={"used": len(train), "held_out": held_out, "beyond_limit": beyond, **_tokens(train)}
    )


def _tokens(rows: TokenRows) -> dict[str, int]:
    return {
        "tokens": int(rows.lengths.sum()),
        "supervised_tokens": int(rows.supervised.sum(dtype=np.int64)),
    }


def _of_file(counts: DataCounts, rule: str) -> str:
    files = (counts.first_dropped_in or {}).get(rule)
    return f" of {files[0]}" if files else ""


def nothing_left(source: str, counts: DataCounts, mismatch: str | None = None) -> DataError:
    """``mismatch``: what is wrong with most rows that were dropped as TemplateMismatch, and what to do."""
    advice = _ADVICE | ({Drop.TEMPLATE_MISMATCH: mismatch} if mismatch else {})
    if not counts.rows:
        return DataError(FailureReason.NO_TRAINABLE_ROWS, f"{source} contains no rows")
    listed = "; ".join(
        f"{rule} {count} (first in line {counts.first_dropped[rule][0]}{_of_file(counts, rule)}): "
        f"{advice[Drop(rule)]}"
        for rule, count in counts.dropped.items()
    )
    masked = Drop.NO_SUPERVISED_TOKENS.value in counts.dropped
    reason = FailureReason.NO_TRAINABLE_TOKENS if masked else FailureReason.NO_TRAINABLE_ROWS
    return DataError(reason, f"none of the {counts.rows} rows of {source} can be trained on: {listed}")
