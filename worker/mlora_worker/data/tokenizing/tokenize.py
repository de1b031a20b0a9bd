"""Rows through the tokenizer, many at a time: while it works on some, the next ones are read and rendered."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mlora_worker.data.reading.row_bounds import text_bytes
from mlora_worker.data.reading.row_types import (
    AnswerPair,
    Chat,
    Drop,
    Dropped,
    PlainText,
    ReadRow,
    UnpairedAnswer,
)
from mlora_worker.data.tokenizing.chat_template import ChatEncoder, Encoded, Rendered
from mlora_worker.data.tokenizing.chunks import batches
from mlora_worker.data.tokenizing.text_tokens import Tokens

# Enough for the tokenizer's threads, and few enough that texts and token objects stay small: the latter take some 170 bytes
# for each character until the tokens are arrays, of two batches at a time.
_BATCH_ROWS = 512
_BATCH_CHARACTERS = 500_000

_MOST_TOGETHER = (
    4 * _BATCH_CHARACTERS
)  # bytes of two batches: one long row may take all the memory that there is


class EncodedPair(NamedTuple):
    """Two answers to one prompt; ``supervised`` of each is its answer and all that follows."""

    chosen: Encoded
    rejected: Encoded


class EncodedUnpaired(NamedTuple):
    """An answer that is desirable or not; ``supervised`` as of a pair's."""

    answer: Encoded
    desirable: bool


EncodedRow = Encoded | EncodedPair | EncodedUnpaired


class _Batch(NamedTuple):
    rows: list[ReadRow]
    rendered: list[Rendered | Drop]
    tokens: Future[list[Tokens | None]]


def encoded_rows(
    rows: Iterable[ReadRow], encoder: ChatEncoder
) -> Generator[tuple[int, EncodedRow | Drop], None, None]:
    """Line and result of each row, in order. Raises what ``rows`` raises, and RowRejected, only after the rows before."""
    waiting: _Batch | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:
        for batch in _batches(rows):
            if waiting is not None and _bytes(waiting.rows) + _bytes(batch) > _MOST_TOGETHER:
                yield from _finished(
                    waiting, encoder
                )  # its tokens are gone before those of the next ones come
                waiting = None
            rendered = encoder.render([chat for row in batch for chat in _parts(row)])
            following = _Batch(batch, rendered, pool.submit(encoder.tokenise, rendered))
            if waiting is not None:
                yield from _finished(waiting, encoder)
            waiting = following
        if waiting is not None:
            yield from _finished(waiting, encoder)


def _finished(batch: _Batch, encoder: ChatEncoder) -> Iterator[tuple[int, EncodedRow | Drop]]:
    encoded = iter(encoder.supervise(batch.rendered, batch.tokens.result()))
    for row in batch.rows:
        if isinstance(row, Dropped):
            yield row.line, row.rule
        elif isinstance(row, AnswerPair):
            yield row.line, _pair(next(encoded), next(encoded))
        elif isinstance(row, UnpairedAnswer):
            yield row.line, _unpaired(next(encoded), row.desirable)
        else:
            yield row.line, next(encoded)


def _pair(chosen: Encoded | Drop, rejected: Encoded | Drop) -> EncodedPair | Drop:
    if isinstance(chosen, Drop):
        return chosen
    return rejected if isinstance(rejected, Drop) else EncodedPair(_to_the_end(chosen), _to_the_end(rejected))


def _unpaired(answer: Encoded | Drop, desirable: bool) -> EncodedUnpaired | Drop:
    return answer if isinstance(answer, Drop) else EncodedUnpaired(_to_the_end(answer), desirable)


def _to_the_end(row: Encoded) -> Encoded:
    """Supervised from its first answer on."""
    return replace(row, supervised=np.logical_or.accumulate(row.supervised))


def _parts(row: ReadRow) -> tuple[Chat | PlainText, ...]:
    """What of it is encoded."""
    if isinstance(row, AnswerPair):
        return row.chosen, row.rejected
    if isinstance(row, UnpairedAnswer):
        return (row.chat,)
    return () if isinstance(row, Dropped) else (row,)


def _batches(rows: Iterable[ReadRow]) -> Iterator[list[ReadRow]]:
    return batches(rows, most=_BATCH_ROWS, size=_size, most_size=_BATCH_CHARACTERS)


def _bytes(rows: list[ReadRow]) -> int:
    return sum(text_bytes(_texts(row)) for row in rows)


def _texts(row: ReadRow) -> list[str]:
    return [
        text for part in _parts(row) for text in ([part.text] if isinstance(part, PlainText) else part.texts)
    ]


def _size(row: ReadRow) -> int:
    return sum(map(len, _texts(row)))
