"""The files of one data set, and the rows of each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from mlora_worker.data.errors import DataError
from mlora_worker.data.reading.columns import Columns
from mlora_worker.data.reading.compression import Undecodable
from mlora_worker.data.reading.file_formats import format_of, records_of_file, records_of_text, unit_of
from mlora_worker.data.reading.row_formats import columns_of, read_rows
from mlora_worker.data.reading.row_types import (
    InvalidRow,
    ReadRow,
    Record,
)
from mlora_worker.protocol import Dataset, FailureReason, FileFormat
from mlora_worker.storage.remote.dataset_source import DatasetSource


@dataclass(frozen=True, slots=True)
class DatasetFile:
    name: str  # for messages
    unit: str  # what the numbers of its rows count: line or row
    rows: Callable[[], Iterator[ReadRow]]


class DatasetFiles:
    def __init__(
        self, dataset: Dataset, source: DatasetSource, text: str | None, most_rows: int | None
    ) -> None:
        """See ``prepare``. Raises StorageError when an address stands for nothing."""
        self._dataset = dataset
        self._source = source
        # ``text`` is that of the task's ConfigMap; rows of an evaluation may lie elsewhere.
        self._text = text if dataset.config_map_ref is not None else dataset.inline
        self._rows_left = most_rows
        self.whole = True  # False once a row was left unread because of ``most_rows``
        self.columns = Columns(dataset)
        self._uris = [uri for address in dataset.addresses for uri in source.find(address, dataset.split)]

    @property
    def name(self) -> str:
        """Of all together, for messages."""
        dataset = self._dataset
        if dataset.config_map_ref is not None:
            return f"ConfigMap {dataset.config_map_ref.name}, key {dataset.config_map_ref.key}"
        return ", ".join(dataset.addresses) or "dataset.inline"

    @property
    def are_several(self) -> bool:
        return len(self._uris) > 1

    @property
    def most_used(self) -> int | None:
        """Rows that are enough. A sample is drawn of all rows, so then none are."""
        return self._dataset.limit if self._dataset.shuffle_seed is None else None

    def versions(self) -> list[tuple[str, str]] | None:
        """Address and version of each file; None where a server does not say."""
        if self._text is not None:
            return [("", hashlib.sha256(self._text.encode("utf-8", "surrogatepass")).hexdigest())]
        versions = []
        for uri in self._uris:
            version = self._source.version(uri)
            if version is None:
                return None
            versions.append((uri, version))
        return versions

    def options(self) -> Any:
        """JSON of all that decides which rows these files have, and what they become."""
        decides = {"format", "file_format", "fields", "train_on"}
        name = self._dataset.config_map_ref.key if self._dataset.config_map_ref is not None else ""
        return [
            self._dataset.model_dump(mode="json", include=decides),
            self.most_used,
            format_of(name, self._dataset.file_format).value,
        ]

    def first_rows(self, most: int) -> list[Mapping[str, Any]]:
        """Those of the first ``most`` that are rows at all, with all their columns. Raises as ``each`` does."""
        found: list[Mapping[str, Any]] = []
        seen = 0
        for name, records in self._first_records(most):
            try:
                with closing(records):
                    for record in islice(records, most - seen):
                        seen += 1
                        if not isinstance(record.value, InvalidRow):
                            found.append(record.value)
            except Undecodable as error:
                raise DataError(FailureReason.INVALID_ROW, f"{name} {error}") from None
            if seen == most:
                break
        return found

    def _first_records(self, most: int) -> Iterator[tuple[str, Generator[Record]]]:
        if self._text is not None:
            own = self._own_text()
            yield self.name, _generated(lambda: records_of_text(*own))
            return
        for uri in self._uris:
            format = format_of(uri, self._dataset.file_format)
            opened = partial(records_of_file, self._source, uri, format, None, at_once=most)
            yield uri, _generated(opened)

    def _own_text(self) -> tuple[list[bytes], FileFormat]:
        assert self._text is not None
        reference = self._dataset.config_map_ref
        format = format_of(reference.key if reference is not None else "", self._dataset.file_format)
        if format is FileFormat.PARQUET:
            raise DataError(
                FailureReason.INVALID_SPEC,
                f"{self.name} is text, but Parquet is a binary format: use a uri",
            )
        return [self._text.encode("utf-8", "surrogatepass")], format

    def each(self) -> Iterator[DatasetFile]:
        if self._text is not None:
            encoded, format = self._own_text()
            yield self._file(self.name, format, lambda: records_of_text(encoded, format))
            return
        for uri in self._uris:
            yield self._file_at(uri)

    def _file_at(self, uri: str) -> DatasetFile:
        dataset = self._dataset
        format = format_of(uri, dataset.file_format)
        columns = columns_of(dataset.format, dataset.fields)
        return self._file(
            uri, format, lambda: records_of_file(self._source, uri, format, columns, self.columns.saw)
        )

    def _file(self, name: str, format: FileFormat, records: Callable[[], Iterator[Record]]) -> DatasetFile:
        unit = unit_of(format)

        def rows() -> Iterator[ReadRow]:
            try:
                yield from self._no_more_than_asked(
                    read_rows(
                        self.columns.read(records()), self._dataset.format, self._dataset.fields, name, unit
                    )
                )
            except Undecodable as error:
                raise DataError(FailureReason.INVALID_ROW, f"{name} {error}") from None

        return DatasetFile(name, unit, rows)

    def _no_more_than_asked(self, rows: Iterator[ReadRow]) -> Iterator[ReadRow]:
        for row in rows:
            if self._rows_left is not None:
                if self._rows_left == 0:
                    self.whole = False
                    return
                self._rows_left -= 1
            yield row


def _generated(opened: Callable[[], Iterator[Record]]) -> Generator[Record]:
    """Opened once the first is asked for, so that a file that holds none says so there; and closed with it."""
    yield from opened()
