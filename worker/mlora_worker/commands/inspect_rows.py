"""``python -m mlora_worker.commands.inspect_rows``: what `mlora validate --data` shows of rows, without training.

Reads a ``LookQuestion`` as JSON from standard input and writes a ``LookAnswer`` to standard output. Of the model, only the
configuration and the tokenizer are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from mlora_worker.commands.stdio import ALL_NETWORKS, failure_of, reply, users_remote, users_store
from mlora_worker.data.errors import DataError
from mlora_worker.data.objective_rows import check_labels
from mlora_worker.data.prepare import prepare
from mlora_worker.data.tokenizing.tokenizer import load_tokenizer
from mlora_worker.data.training_rows.token_rows import TokenRow, TokenRows
from mlora_worker.model.architecture import read_config
from mlora_worker.model.errors import ModelError
from mlora_worker.model.text_part import text_config
from mlora_worker.protocol import FailureReason, HistogramBar, LookAnswer, LookQuestion, ShownPart
from mlora_worker.storage.base_model.model_source import open_model
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.remote.dataset_source import open_sources

_BARS = 10
_LABELS: Final[Mapping[bool | None, Literal["desirable", "undesirable"] | None]] = {
    None: None,
    True: "desirable",
    False: "undesirable",
}


def main() -> None:
    reply("mlora_worker.commands.inspect_rows", LookQuestion, look)


def look(question: LookQuestion) -> LookAnswer:
    """Never raises for what is wrong with model or rows: that is the answer."""
    access = question.storage
    try:
        store = users_store(question.model_storage)
        remote = users_remote(question.model_storage, question.hub_endpoint)
        folder = open_model(store, question.model, Path(question.cache_dir), remote).folder()
        tokenizer = load_tokenizer(folder)
        source = open_sources(
            users_store(access, missing=FailureReason.DATASET_NOT_FOUND),
            access,
            allowed_networks=ALL_NETWORKS,
            hub_endpoint=question.hub_endpoint,
        )
        config = text_config(read_config(folder))
        longest = int(config.max_position_embeddings)
        prepared = prepare(
            question.dataset,
            question.training.for_model(longest),
            tokenizer,
            source,
            longest,
            template=question.dataset.chat_template,
            vocabulary=int(config.vocab_size),
            look_only=True,
        )
        if question.training.preference is not None:
            check_labels(prepared.rows)
            check_labels(prepared.held_out, of_evaluation=True)
    except (DataError, ModelError, StorageError) as error:
        return LookAnswer(failure=failure_of(error))
    rows, labels = prepared.rows, prepared.rows.desirable
    return LookAnswer(
        counts=prepared.counts,
        desirable=None if labels is None else int(labels.sum()),
        longest=int(rows.lengths.max()),
        histogram=tuple(histogram(rows)),
        shown=tuple(tuple(parts(row, tokenizer)) for row in rows[: question.show]),
    )


def histogram(rows: TokenRows) -> Iterator[HistogramBar]:
    """Of lengths, in about ``_BARS`` bars of one round width."""
    longest = int(rows.lengths.max())
    width = max(1, -(-longest // _BARS))
    step = 10 ** max(0, len(str(width)) - 2)
    width = -(-width // step) * step
    counts = np.bincount(rows.lengths // width)
    for bar, count in enumerate(counts.tolist()):
        yield HistogramBar(low=bar * width, high=(bar + 1) * width, rows=count)


def parts(row: TokenRow, tokenizer: Any) -> Iterator[ShownPart]:
    """The row's text, cut where supervision begins or ends, and between the two sequences of a pair. A token is supervised
    when the position before predicts it."""
    learnt = np.concatenate([[False], row.labels[:-1] >= 0])
    sequence = (np.arange(len(row.ids)) >= row.split) if row.split else np.zeros(len(row.ids), bool)
    marks = zip(sequence.tolist(), learnt.tolist(), strict=True)
    for (second, supervised), run in groupby(
        zip(marks, row.ids.tolist(), strict=True), key=lambda token: token[0]
    ):
        ids = [token for _, token in run]
        answer = ("rejected" if second else "chosen") if row.split else _LABELS[row.desirable]
        yield ShownPart(
            text=tokenizer.decode(ids, skip_special_tokens=False), learnt=supervised, answer=answer
        )


if __name__ == "__main__":
    main()
