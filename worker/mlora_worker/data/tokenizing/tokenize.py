"""Rows through the tokenizer, many at a time: while it works on some, the next ones are read and rendered."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from mlora_worker.data.reading.row_bounds import text_bytes
from mlora_worker.data.reading.row_types import Chat, Drop, Dropped, PlainText
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

Row = Chat | PlainText | Dropped


class _Batch(NamedTuple):
    rows: list[Row]
    rendered: list[Rendered | Drop]
    tokens: Future[list[Tokens | None]]


def encoded_rows(
    rows: Iterable[Row], encoder: ChatEncoder
) -> Generator[tuple[int, Encoded | Drop], None, None]:
    """Line and result of each row, in order. Raises what ``rows`` raises, and RowRejected, only after the rows before."""
    waiting: _Batch | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:
        for batch in _batches(rows):
            if waiting is not None and _bytes(waiting.rows) + _bytes(batch) > _MOST_TOGETHER:
                yield from _finished(
                    waiting, encoder
                )  # its tokens are gone before those of the next ones come
                waiting = None
            rendered = encoder.render([row for row in batch if not isinstance(row, Dropped)])
            following = _Batch(batch, rendered, pool.submit(encoder.tokenise, rendered))
            if waiting is not None:
                yield from _finished(waiting, encoder)
            waiting = following
        if waiting is not None:
            yield from _finished(waiting, encoder)


def _finished(batch: _Batch, encoder: ChatEncoder) -> Iterator[tuple[int, Encoded | Drop]]:
    encoded = iter(encoder.supervise(batch.rendered, batch.tokens.result()))
    for row in batch.rows:
        yield row.line, row.rule if isinstance(row, Dropped) else next(encoded)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    return batches(rows, most=_BATCH_ROWS, size=_size, most_size=_BATCH_CHARACTERS)


def _bytes(rows: list[Row]) -> int:
    return sum(text_bytes(_texts(row)) for row in rows)


def _texts(row: Row) -> list[str]:
    if isinstance(row, Chat):
        return [turn.content for turn in row.turns]
    return [row.text] if isinstance(row, PlainText) else []


def _size(row: Row) -> int:
    return sum(map(len, _texts(row)))
