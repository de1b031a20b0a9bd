"""A task's rows, ready to train on: read, rendered, tokenised, cut to length, counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mlora_worker.data.errors import DataError
from mlora_worker.data.formats import Chat, Drop, Dropped, read_rows
from mlora_worker.data.template import ChatEncoder, Encoded
from mlora_worker.protocol import DataCounts, Dataset, DatasetFormat, FailureReason, Overlong, Training
from mlora_worker.stream.fit import Misfit, check_length

IGNORED = -100  # label of a position that is not supervised
FIRST_LINES = 10  # of dropped rows that are named per rule

# Rows are tokenised in batches: enough for the tokenizer's threads, and few enough that their texts and token
# objects, which are far larger than the arrays kept, stay small.
_BATCH_ROWS = 512
_BATCH_CHARACTERS = 2_000_000


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """``labels[i]`` is the token to predict AT position i: ``ids[i + 1]`` if that token is supervised, else
    -100. The shift is done here once; nobody shifts again.
    """

    ids: npt.NDArray[np.int32]  # [tokens]
    labels: npt.NDArray[np.int32]  # [tokens]


class LineSource(Protocol):
    """A store, as far as it is needed here."""

    def open_lines(self, uri: str) -> Iterator[bytes]: ...


@dataclass(frozen=True)
class Prepared:
    rows: list[TokenRow]
    counts: DataCounts


def prepare(
    dataset: Dataset, training: Training, tokenizer: Any, store: LineSource, max_positions: int
) -> Prepared:
    """All usable rows in the file's order. ``max_positions`` is the longest sequence that the base model
    takes.

    Raises DataError: InvalidSpec, InvalidRow, RowTooLong, NoTrainableRows, NoTrainableTokens; StorageError
    when the file cannot be read.
    """
    source = dataset.uri or "dataset.inline"
    encoder = ChatEncoder(tokenizer)
    try:
        check_length(max_positions, training)
    except Misfit as error:
        raise DataError(error.reason, str(error)) from None
    if dataset.format is DatasetFormat.MESSAGES and not encoder.has_template:
        raise DataError(
            FailureReason.INVALID_SPEC,
            "dataset.format is messages, but the base model's tokenizer has no chat template; use "
            "promptCompletion, or a base model with a template",
        )
    lines = (
        iter(dataset.inline.encode().split(b"\n")) if dataset.inline is not None else store.open_lines(source)
    )
    tally = _Tally()
    rows: list[TokenRow] = []
    for batch in _batches(read_rows(lines, dataset.format, dataset.fields, source)):
        chats = [row for row in batch if isinstance(row, Chat)]
        try:
            encoded = iter(encoder.encode(chats))
        except DataError as error:
            raise DataError(error.reason, f"{source}, {error}") from None
        for row in batch:
            result = row.rule if isinstance(row, Dropped) else next(encoded)
            made = (
                result if isinstance(result, Drop) else _token_row(result, training, row.line, source, tally)
            )
            if isinstance(made, Drop):
                tally.drop(made, row.line)
            else:
                rows.append(made)
    counts = tally.counts(rows)
    if not rows:
        raise _nothing_left(source, counts)
    return Prepared(rows, counts)


def labels_of(ids: npt.NDArray[np.int32], supervised: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """[tokens] -> [tokens], shifted: see ``TokenRow``. The first token has nobody to predict it."""
    labels = np.full(len(ids), IGNORED, np.int32)
    labels[:-1][supervised[1:]] = ids[1:][supervised[1:]]
    return labels


@dataclass
class _Tally:
    dropped: Counter[str] = field(default_factory=Counter)
    first_lines: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    truncated: int = 0

    def drop(self, rule: Drop, line: int) -> None:
        self.dropped[rule.value] += 1
        if len(self.first_lines[rule.value]) < FIRST_LINES:
            self.first_lines[rule.value].append(line)

    def counts(self, rows: list[TokenRow]) -> DataCounts:
        return DataCounts(
            rows=len(rows) + self.dropped.total(),
            used=len(rows),
            dropped=dict(self.dropped),
            first_dropped={rule: tuple(lines) for rule, lines in self.first_lines.items()},
            truncated=self.truncated,
            tokens=sum(len(row.ids) for row in rows),
            supervised_tokens=sum(int((row.labels != IGNORED).sum()) for row in rows),
        )


def _token_row(
    encoded: Encoded, training: Training, line: int, source: str, tally: _Tally
) -> TokenRow | Drop:
    """Applies the length policy, then drops what has no label left."""
    ids, supervised, limit = encoded.ids, encoded.supervised, training.max_seq_length
    if too_long := len(ids) > limit:
        if training.overlong is Overlong.SKIP:
            return Drop.TOO_LONG
        if training.overlong is Overlong.FAIL:
            raise DataError(
                FailureReason.ROW_TOO_LONG,
                f"{source}, line {line} has {len(ids)} tokens, training.maxSeqLength is {limit}; raise it, "
                "shorten the row, or set training.overlong to truncate or skip",
            )
        ids, supervised = ids[:limit].copy(), supervised[:limit]  # copy: a view would keep the whole row
    labels = labels_of(ids, supervised)
    if not (labels != IGNORED).any():
        return Drop.NO_SUPERVISED_TOKENS
    tally.truncated += too_long
    return TokenRow(ids, labels)


def _batches(rows: Iterable[Chat | Dropped]) -> Iterator[list[Chat | Dropped]]:
    batch: list[Chat | Dropped] = []
    characters = 0
    for row in rows:
        batch.append(row)
        if isinstance(row, Chat):
            characters += sum(len(turn.content) for turn in row.turns)
        if len(batch) == _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


_ADVICE = {
    Drop.NO_ANSWER: "the answers are empty: check dataset.fields and the file",
    Drop.TOOL_CALLS: "rows with tool calls are not supported",
    Drop.TEMPLATE_MISMATCH: "the base model's chat template does not show which tokens are the answer; "
    "without a template, let prompts end without white space and completions begin with it",
    Drop.TOO_LONG: "raise training.maxSeqLength or set training.overlong to truncate",
    Drop.NO_SUPERVISED_TOKENS: "training.maxSeqLength cuts every answer off: raise it",
}


def _nothing_left(source: str, counts: DataCounts) -> DataError:
    if not counts.rows:
        return DataError(FailureReason.NO_TRAINABLE_ROWS, f"{source} holds no rows")
    told = "; ".join(
        f"{rule} {count} (first in line {counts.first_dropped[rule][0]}): {_ADVICE[Drop(rule)]}"
        for rule, count in counts.dropped.items()
    )
    masked = Drop.NO_SUPERVISED_TOKENS.value in counts.dropped
    reason = FailureReason.NO_TRAINABLE_TOKENS if masked else FailureReason.NO_TRAINABLE_ROWS
    return DataError(reason, f"none of the {counts.rows} rows of {source} can be trained on: {told}")
