"""All rows of one task: those that it trains on, and those that it is evaluated on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np

from mlora_worker.data.errors import DataError
from mlora_worker.data.objective_rows import check_labels
from mlora_worker.data.prepare import Prepared, prepare
from mlora_worker.data.reading.row_bounds import MOST_TEXT
from mlora_worker.data.training_rows.row_cache import RowCache
from mlora_worker.data.training_rows.token_rows import TokenRows
from mlora_worker.protocol import DataCounts, Dataset, DatasetFormat, FailureReason, TaskPlan
from mlora_worker.storage.remote.dataset_source import DatasetSource
from mlora_worker.stream.planner import TaskLoad, load_of, rows_per_step


@dataclass(frozen=True, slots=True)
class TaskRows:
    train: TokenRows
    counts: DataCounts
    load: TaskLoad  # of a usual step
    evaluation: TokenRows | None = None


def task_rows(
    task: TaskPlan,
    tokenizer: Any,
    source: DatasetSource,
    max_positions: int,
    *,
    day: date | None = None,
    cache: RowCache | None = None,
    vocabulary: int | None = None,
    most_text: int = MOST_TEXT,
) -> TaskRows:
    """What follows from looks at each row is worked out, too: the digests of what is returned, and the load.

    Raises what ``prepare`` raises, and DataError where there are no rows to evaluate on.
    """

    def rows_of(dataset: Dataset) -> Prepared:
        return prepare(
            dataset,
            task.training,
            tokenizer,
            source,
            max_positions,
            text=task.dataset_text,
            template=task.chat_template,
            day=day,
            cache=cache,
            vocabulary=vocabulary,
            most_text=most_text,
        )

    prepared = rows_of(task.dataset)
    check_labels(prepared.rows)
    evaluation = None
    if task.evaluation is not None:
        rows = prepared.held_out
        if task.evaluation.uri is not None:
            rows = rows_of(_evaluation_dataset(task, prepared.counts.format)).rows
        evaluation = _limited(rows, task.evaluation.limit)
        check_labels(evaluation, of_evaluation=True)
        evaluation.digest()
    prepared.rows.digest()
    load = load_of(prepared.rows.lengths.tolist(), rows_per_step(task.training))
    return TaskRows(prepared.rows, prepared.counts, load, evaluation)


def _evaluation_dataset(task: TaskPlan, format: DatasetFormat | None) -> Dataset:
    """Its rows have the format of those that are trained on."""
    assert task.evaluation is not None
    assert format is not None
    elsewhere = {"uri": task.evaluation.uri, "uris": None, "inline": None, "config_map_ref": None}
    whole = {"limit": task.evaluation.limit, "held_out": None, "shuffle_seed": None, "split": None}
    return task.dataset.with_format(format).model_copy(update=elsewhere | whole)


def _limited(rows: TokenRows, limit: int | None) -> TokenRows:
    if not len(rows):
        raise DataError(
            FailureReason.INVALID_SPEC,
            "evaluation has no rows: set evaluation.uri, or hold out some of the rows with dataset.heldOut",
        )
    return rows.chosen(np.arange(limit)) if limit is not None and len(rows) > limit else rows
