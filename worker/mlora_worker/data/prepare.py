"""A task's rows, ready to train on: read, rendered, tokenised, cut to length, chosen, counted."""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt

from mlora_worker.data.errors import DataError
from mlora_worker.data.objective_rows import check_objective, format_of
from mlora_worker.data.reading.dataset_files import DatasetFiles
from mlora_worker.data.reading.detection import with_format
from mlora_worker.data.reading.row_bounds import MOST_TEXT
from mlora_worker.data.reading.row_types import Drop
from mlora_worker.data.reading.selection import select
from mlora_worker.data.reading.tally import Tally, nothing_left, selected_counts
from mlora_worker.data.tokenizing.chat_template import ChatEncoder, Encoded, RowRejected
from mlora_worker.data.tokenizing.rendering import uses_date
from mlora_worker.data.tokenizing.sandbox import InvalidTemplate
from mlora_worker.data.tokenizing.tokenize import EncodedRow, EncodedUnpaired, encoded_rows
from mlora_worker.data.training_rows.row_cache import RowCache, key_of, tokenizer_hash
from mlora_worker.data.training_rows.token_rows import (
    IGNORED,
    MemoryWriter,
    RowWriter,
    TokenRow,
    TokenRows,
    labels_of,
)
from mlora_worker.protocol import (
    SHAPE_OF,
    DataCounts,
    Dataset,
    DatasetFields,
    DatasetFormat,
    FailureReason,
    Overlong,
    Training,
    without_credentials,
)
from mlora_worker.storage.errors import UselessAnswer
from mlora_worker.storage.remote.dataset_source import DatasetSource
from mlora_worker.stream.fit import check_length
from mlora_worker.stream.targets import Misfit

__all__ = ["IGNORED", "Prepared", "TokenRow", "TokenRows", "labels_of", "prepare"]


log = logging.getLogger(__name__)

# Formats whose rows a tokenizer without a chat template takes; of preferences, those that are texts.
_PLAIN_TOO = (
    DatasetFormat.PROMPT_COMPLETION,
    DatasetFormat.PREFERENCE,
    DatasetFormat.UNPAIRED_PREFERENCE,
)


@dataclass(frozen=True, slots=True)
class Prepared:
    rows: TokenRows
    held_out: TokenRows  # of dataset.heldOut: never trained on
    counts: DataCounts
    whole: bool = True  # every row of the source was looked at


def prepare(
    dataset: Dataset,
    training: Training,
    tokenizer: Any,
    source: DatasetSource,
    max_positions: int,
    *,
    text: str | None = None,
    template: str | None = None,
    day: date | None = None,
    cache: RowCache | None = None,
    most_rows: int | None = None,
    vocabulary: int | None = None,
    most_text: int = MOST_TEXT,
    look_only: bool = False,
) -> Prepared:
    """All usable rows in the files' order. ``max_positions`` is the longest sequence that the base model takes,
    ``vocabulary`` how many rows its embedding has: a tokenizer may know more tokens (None: rows are not held against it).

    ``text``: what the ConfigMap of ``dataset.configMapRef`` holds. ``template``: the task's own chat template.
    ``day``: what a template that writes the date is message; None: today.
    ``cache``: where tokenised rows are kept, and looked for first; without it they are in memory. ``most_rows``: stop
    after so many rows, to look at a large file. ``most_text``: bytes of the texts of one row. ``look_only``: whatever
    shall be made of the rows.

    Raises DataError: InvalidSpec, InvalidRow, RowTooLong, NoTrainableRows, NoTrainableTokens; StorageError
    when a file cannot be read; OSError when rows cannot be kept, for want of room on the worker's own disk.
    """
    day = day or date.today()
    if dataset.detect_format and training.preference is not None:
        dataset = dataset.with_format(format_of(training.preference))
    dataset = with_format(dataset, source, text, own_template=template is not None)
    _check_columns(dataset.format, dataset.fields)
    if not look_only:
        check_objective(dataset.format, training)
    with _checked_encoder(dataset, training, tokenizer, max_positions, template, day, most_text) as encoder:
        files = DatasetFiles(dataset, source, text, most_rows)
        renderer = _renderer_hash(tokenizer, template, day)
        rows, counts = _usable(files, encoder, training, renderer, cache, vocabulary)
        mismatch = encoder.why_mismatched()
    if not len(rows):
        raise nothing_left(files.name, counts, mismatch.value if mismatch is not None else None)
    chosen = select(len(rows), dataset, training.seed)
    if not len(chosen.train):
        raise DataError(
            FailureReason.NO_TRAINABLE_ROWS,
            f"{files.name} has {counts.used} usable rows and dataset.heldOut removes all of them from training: "
            f"lower it",
        )
    train = rows if len(chosen.train) == len(rows) else rows.chosen(chosen.train)
    held_out = rows.chosen(chosen.held_out)
    counts = selected_counts(counts, train, len(held_out), chosen.beyond)
    return Prepared(train, held_out, counts.model_copy(update={"format": dataset.format}), files.whole)


def _check_columns(format: DatasetFormat, fields: DatasetFields) -> None:
    """Raises DataError where two fields of the format name one column, as only the rows tell where no format is named."""
    for one, other in itertools.combinations(SHAPE_OF[format].columns, 2):
        if getattr(fields, one) == getattr(fields, other):
            raise DataError(
                FailureReason.INVALID_SPEC,
                f"of format {format.value}, dataset.fields.{one} and fields.{other} name the same column "
                f"{getattr(fields, one)!r}: correct dataset.fields",
            )


def _renderer_hash(tokenizer: Any, template: str | None, day: date) -> str:
    """Of all that turns conversations into tokens."""
    parts = [tokenizer_hash(tokenizer)]
    if template is not None:
        parts.append(hashlib.sha256(template.encode()).hexdigest())
    if uses_date(tokenizer, template):
        parts.append(day.isoformat())
    return " ".join(parts)


@contextmanager
def _checked_encoder(
    dataset: Dataset,
    training: Training,
    tokenizer: Any,
    max_positions: int,
    template: str | None,
    day: date,
    most_text: int,
) -> Iterator[ChatEncoder]:
    try:
        check_length(max_positions, training)
    except Misfit as error:
        raise DataError(error.reason, str(error)) from None
    templated = dataset.format is not DatasetFormat.TEXT
    try:
        encoder = ChatEncoder(
            tokenizer, dataset.supervised, template, templated=templated, day=day, most_text=most_text
        )
    except InvalidTemplate as error:
        message = (
            f"dataset.chatTemplate: {error}"
            if template is not None
            else f"the base model's chat template is invalid: {error}; correct it in the model's folder, or give "
            f"the task its own template (dataset.chatTemplate)"
        )
        raise DataError(FailureReason.INVALID_SPEC, message) from None
    with closing(encoder):
        if dataset.format is DatasetFormat.TEXT:
            encoder.check_plain()
        elif dataset.format not in _PLAIN_TOO and not encoder.has_template:
            raise DataError(
                FailureReason.INVALID_SPEC,
                f"dataset.format is {dataset.format.value}, but the base model's tokenizer has no chat template; use "
                "promptCompletion, a base model with a template, or dataset.chatTemplate",
            )
        yield encoder


def _usable(
    files: DatasetFiles,
    encoder: ChatEncoder,
    training: Training,
    renderer: str,
    cache: RowCache | None,
    vocabulary: int | None,
) -> tuple[TokenRows, DataCounts]:
    """Every row that can be trained on, whatever is chosen of them later."""
    if cache is None:
        return _tokenised(files, encoder, training, MemoryWriter(), vocabulary)
    versions = files.versions()
    key = None
    if versions is not None:
        lengths = [training.max_seq_length, training.overlong.value]
        key = key_of(versions, renderer, [files.options(), *lengths, vocabulary])
        kept = cache.find(key)
        if kept is not None:
            return kept.rows, kept.counts

    def written(cache: RowCache) -> tuple[TokenRows, DataCounts]:
        with cache.writing() as writer:
            rows, counts = _tokenised(files, encoder, training, writer, vocabulary)
            if files.versions() != versions:
                raise UselessAnswer(
                    f"{files.name} changed while it was being read: retry when it is complete"
                )
            if key is not None and len(rows):
                cache.keep(key, writer, rows, counts)
            return rows, counts

    try:
        return written(cache)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        log.warning("the cached rows of other tasks are removed: %s", error)
        cache.prune(0)
        return written(cache)


def _tokenised(
    files: DatasetFiles,
    encoder: ChatEncoder,
    training: Training,
    writer: RowWriter,
    vocabulary: int | None,
) -> tuple[TokenRows, DataCounts]:
    tally = Tally()
    for file in files.each():
        shown = without_credentials(file.name) if files.are_several else None
        try:
            with closing(encoded_rows(file.rows(), encoder)) as encoded:
                for line, result in encoded:
                    made = _made(result, training, encoder.bos)
                    if isinstance(made, Drop):
                        tally.drop(made, line, shown)
                        continue
                    if vocabulary is not None and made.ids.max() >= vocabulary:
                        raise RowRejected(line, _unknown_token(made.ids, vocabulary, encoder))
                    writer.add(
                        made.ids, made.supervised, made.labels, made.count, made.weight, made.split, made.desirable
                    )  # fmt: skip
                    tally.use(truncated=made.truncated, special=made.special)
                    if tally.used == files.most_used:
                        break
        except RowRejected as error:
            raise DataError(error.reason, f"{file.name}, {file.unit} {error.line} {error}") from None
        if tally.used == files.most_used:
            break
    if files.whole:
        files.columns.check(files.name)
    rows = writer.finish()
    return rows, tally.counts(rows)


def _unknown_token(ids: npt.NDArray[np.int32], vocabulary: int, encoder: ChatEncoder) -> str:
    """That the model has no embedding for a token, which a device would answer with an error that ends everybody."""
    token = int(ids[ids >= vocabulary][0])
    return (
        f"has the token {encoder.token(token)!r} with number {token}, but the base model's embedding has "
        f"{vocabulary} rows: the token was added to the tokenizer but not to the model. Remove it from the row, or "
        f"use a model whose embedding has a row for it"
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Trainable:
    ids: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.bool_]
    labels: npt.NDArray[np.int32]
    count: int  # of labels that are tokens
    truncated: bool
    weight: float
    special: bool
    split: int = 0  # of a pair, tokens of the chosen row
    desirable: bool | None = None  # of an answer that has a label


def _made(result: EncodedRow | Drop, training: Training, bos: int | None) -> _Trainable | Drop:
    """The length policy holds for each row of a pair; what drops one of them drops both."""
    if isinstance(result, Drop):
        return result
    if isinstance(result, Encoded):
        return _trainable(result, training, bos)
    if isinstance(result, EncodedUnpaired):
        answer = _trainable(result.answer, training, bos)
        return answer if isinstance(answer, Drop) else replace(answer, desirable=result.desirable)
    chosen, rejected = (_trainable(row, training, bos) for row in result)
    if isinstance(chosen, Drop):
        return chosen
    if isinstance(rejected, Drop):
        return rejected
    if np.array_equal(chosen.ids, rejected.ids):
        return Drop.EQUAL_ANSWERS
    return _Trainable(
        np.concatenate([chosen.ids, rejected.ids]),
        np.concatenate([chosen.supervised, rejected.supervised]),
        np.concatenate([chosen.labels, rejected.labels]),
        chosen.count + rejected.count,
        chosen.truncated or rejected.truncated,
        chosen.weight,
        chosen.special or rejected.special,
        len(chosen.ids),
    )


def _trainable(row: Encoded, training: Training, bos: int | None) -> _Trainable | Drop:
    """Applies the length policy, then drops what has no label left. Raises RowRejected with ``overlong: fail``."""
    ids, supervised = row.ids, row.supervised
    limit, length = training.max_seq_length, len(ids)
    if length > limit:
        match training.overlong:
            case Overlong.SKIP:
                return Drop.TOO_LONG
            case Overlong.FAIL:
                raise RowRejected(
                    row.line,
                    f"has {length} tokens, training.maxSeqLength is {limit}; raise it, "
                    "shorten the row, or set training.overlong to truncate or skip",
                    FailureReason.ROW_TOO_LONG,
                )
            case Overlong.TRUNCATE:
                ids, supervised = ids[:limit], supervised[:limit]
            case Overlong.TRUNCATE_LEFT:
                ids, supervised = _end_of(ids, supervised, limit, bos)
    labels = labels_of(ids, supervised)
    count = int(np.count_nonzero(supervised[1:]))
    if not count:
        return Drop.NO_SUPERVISED_TOKENS
    return _Trainable(ids, supervised, labels, count, length > limit, row.weight, row.special)


def _end_of(
    ids: npt.NDArray[np.int32], supervised: npt.NDArray[np.bool_], limit: int, bos: int | None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """The last tokens. A beginning-of-sequence token stays in front: models attend to it as to nothing else."""
    front = int(bos is not None and ids[0] == bos)
    cut = len(ids) - limit + front
    kept = np.concatenate([supervised[:front], supervised[cut:]])
    kept[front] = False  # what stood before it is gone
    return np.concatenate([ids[:front], ids[cut:]]), kept
