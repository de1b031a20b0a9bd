"""The format of a data set whose task names none."""

from __future__ import annotations

from mlora_worker.data.errors import DataError
from mlora_worker.data.reading.dataset_files import DatasetFiles
from mlora_worker.protocol import (
    FIRST_ROWS,
    Dataset,
    FailureReason,
    FormatNotDetected,
    TrainOn,
    detected_format,
)
from mlora_worker.storage.remote.dataset_source import DatasetSource


def with_format(
    dataset: Dataset, source: DatasetSource, text: str | None, *, own_template: bool = False
) -> Dataset:
    """``dataset`` with the format of its first rows, unless it has one. ``text`` as in ``prepare``; ``own_template``: the
    task has a chat template.

    Where none of these are rows, any format does: reading them says what is wrong. Raises DataError; StorageError.
    """
    if not dataset.detect_format:
        return dataset
    files = DatasetFiles(dataset, source, text, None)
    rows = files.first_rows(FIRST_ROWS)
    if not rows:
        return dataset.with_format(dataset.format)
    plain = dataset.train_on in (None, TrainOn.EVERYTHING) and not own_template
    try:
        return dataset.with_format(detected_format(rows, dataset.fields, text=plain))
    except FormatNotDetected as error:
        raise DataError(FailureReason.INVALID_SPEC, f"{files.name}: {error}") from None
