"""The rows that both sides train on: GSM8K, through the project's own data preparation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mlora_worker.data.prepare import IGNORED, TokenRow, prepare
from mlora_worker.data.tokenizing.tokenizer import load_tokenizer
from mlora_worker.protocol import Dataset, DatasetFields, StorageAccess, Training
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import open_sources

GSM8K = Path(__file__).parent.parent / "examples" / "gsm8k" / "train.jsonl"
HELD_OUT = GSM8K.with_name("heldout.jsonl")
FIELDS = DatasetFields(prompt="question", completion="answer")
MAX_SEQ_LENGTH = 512


def gsm8k_rows(model: Path, file: Path = GSM8K) -> list[TokenRow]:
    """All rows, in the file's order, with the chat template of the tokenizer in ``model``."""
    store = open_store(StorageAccess(), allow_files=True)
    dataset = Dataset(uri=f"file://{file}", fields=FIELDS)
    training = Training(max_seq_length=MAX_SEQ_LENGTH)
    source = open_sources(store, StorageAccess())
    return list(prepare(dataset, training, load_tokenizer(model), source, MAX_SEQ_LENGTH).rows)


@dataclass(frozen=True)
class Batch:
    """One optimizer step of every task: ``rows[t]`` are the rows of task t."""

    rows: tuple[tuple[TokenRow, ...], ...]

    @property
    def tokens(self) -> int:
        """Real ones: no padding."""
        return sum(len(row.ids) for task in self.rows for row in task)

    @property
    def supervised(self) -> tuple[int, ...]:
        """Tokens that each task's loss is taken of."""
        return tuple(sum(int((row.labels != IGNORED).sum()) for row in task) for task in self.rows)


def deal(rows: Sequence[TokenRow], tasks: int, batch: int, step: int) -> Batch:
    """Step ``step`` (from 0) of ``tasks`` tasks with ``batch`` rows each: the next rows in order, which go round."""
    start = step * tasks * batch
    taken = [rows[(start + i) % len(rows)] for i in range(tasks * batch)]
    return Batch(tuple(tuple(taken[t * batch : (t + 1) * batch]) for t in range(tasks)))


def shortest(rows: Sequence[TokenRow], count: int) -> list[TokenRow]:
    """For warming up and for checks."""
    return sorted(rows, key=lambda row: len(row.ids))[:count]


@dataclass(frozen=True)
class Padded:
    """Rows as a rectangle, padded on the right."""

    ids: Tensor  # [rows, longest] int64
    targets: Tensor  # [rows, longest] int64: the token to predict AT a position, IGNORED where none is
    mask: Tensor  # [rows, longest] int64: 1 where a token is real

    @property
    def unshifted_labels(self) -> Tensor:
        """[rows, longest] as transformers' own loss takes them: it shifts by itself."""
        labels = torch.full_like(self.targets, IGNORED)
        labels[:, 1:] = self.targets[:, :-1]
        return labels


def pad(rows: Sequence[TokenRow], multiple: int = 1) -> Padded:
    """To the longest row, rounded up to a multiple of ``multiple``."""
    longest = -(-max(len(row.ids) for row in rows) // multiple) * multiple
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    targets = torch.full((len(rows), longest), IGNORED, dtype=torch.int64)
    mask = torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        length = len(row.ids)
        ids[i, :length] = torch.from_numpy(row.ids.astype(np.int64))
        targets[i, :length] = torch.from_numpy(row.labels.astype(np.int64))
        mask[i, :length] = 1
    return Padded(ids, targets, mask)


@dataclass(frozen=True)
class Packed:
    """Rows one after the other, without padding."""

    ids: Tensor  # [tokens] int64
    targets: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64: each row counts from 0
    lengths: tuple[int, ...]

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Where rows begin, and the end."""
        return (0, *accumulate(self.lengths))


def pack(rows: Sequence[TokenRow]) -> Packed:
    """A row that is a pair gives both its sequences."""
    lengths = tuple(length for row in rows for length in row.lengths)
    return Packed(
        ids=torch.from_numpy(np.concatenate([row.ids for row in rows]).astype(np.int64)),
        targets=torch.from_numpy(np.concatenate([row.labels for row in rows]).astype(np.int64)),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        lengths=lengths,
    )
