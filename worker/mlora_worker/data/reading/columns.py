"""Which columns the rows of a data set have, to name those that ``dataset.fields`` names and no row has. Pure.

A column that every row needs is missed in the first row without it. One that may be absent would be lost in silence, with
all that it holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

from mlora_worker.data.errors import DataError
from mlora_worker.data.reading.row_types import InvalidRow, Record
from mlora_worker.protocol import SHAPE_OF, Dataset, DatasetFields, FailureReason

_MOST_NAMES: Final = 1000  # of other columns that are remembered
_SHOWN: Final = 10


class Columns:
    """Of the rows that were read."""

    def __init__(self, dataset: Dataset) -> None:
        defaults = DatasetFields()
        self._missing = {
            field: getattr(dataset.fields, field)
            for field in SHAPE_OF[dataset.format].optional
            if getattr(dataset.fields, field) != getattr(defaults, field)
        }
        self._names: dict[str, None] = {}
        self._rows = 0

    def saw(self, names: Iterable[str]) -> None:
        """What a file says that its rows have."""
        for name in names:
            if name not in self._names and len(self._names) < _MOST_NAMES:
                self._names[name] = None
            for field in [field for field, column in self._missing.items() if column == name]:
                del self._missing[field]

    def read(self, records: Iterable[Record]) -> Iterable[Record]:
        for record in records:
            if self._missing and not isinstance(record.value, InvalidRow):
                self._rows += 1
                self.saw(record.value)
            yield record

    def check(self, source: str) -> None:
        """Raises DataError for a column that is named and that no row has."""
        if not self._rows:
            return
        for field, column in self._missing.items():
            by_lower = {name.lower(): name for name in self._names}
            near = get_close_matches(column.lower(), by_lower, n=1)
            meant = f"; did you mean {by_lower[near[0]]!r}?" if near else "."
            there = ", ".join(map(repr, sorted(self._names)[:_SHOWN])) or "none"
            raise DataError(
                FailureReason.INVALID_SPEC,
                f"dataset.fields.{field} names the column {column!r}, which no row of {source} has; their columns are "
                f"{there}{meant} Correct the name, or leave dataset.fields.{field} out",
            )
