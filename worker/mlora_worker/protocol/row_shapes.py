"""Which format rows have, as their keys tell: one table for the worker, `mlora init` and `mlora validate`. Pure.

A format is taken by these rules, in this order:

1. It is one that the rest of the task allows: it has every column that ``dataset.fields`` renames, and ``text`` is left out
   where there are answers to choose from or a template to use.
2. Every one of the first rows has all its required columns, under the names of ``dataset.fields``.
3. One whose required columns are among those of another such format gives way to it. ``unpairedPreference`` is one only
   where its column ``label`` says true or false in each of these rows: many rows of other formats have a label. One that
   ``dataset.fields`` names is meant.
4. ``text`` is taken only where nothing else could be meant.

What is left must be exactly one. Columns with other names are never guessed: they are suggested.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mlora_worker.protocol.dataset import DatasetFields, DatasetFormat

FIRST_ROWS: Final = 20  # that are looked at
_SHOWN: Final = 10  # keys in a message, with so many characters each:
_LONGEST: Final = 40

Row = Mapping[str, Any]


class RowShape(NamedTuple):
    """Columns by their names in ``DatasetFields``. ``fallback``: see rule 4."""

    format: DatasetFormat
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    fallback: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return self.required + self.optional


ROW_SHAPES: Final = (
    RowShape(DatasetFormat.PROMPT_COMPLETION, ("prompt", "completion")),
    RowShape(DatasetFormat.MESSAGES, ("messages",)),
    RowShape(DatasetFormat.ALPACA, ("instruction", "output"), optional=("input", "system")),
    RowShape(DatasetFormat.SHAREGPT, ("conversations",), optional=("system",)),
    RowShape(DatasetFormat.PREFERENCE, ("chosen", "rejected"), optional=("prompt",)),
    RowShape(DatasetFormat.UNPAIRED_PREFERENCE, ("prompt", "completion", "label")),
    RowShape(DatasetFormat.TEXT, ("text",), fallback=True),
)
SHAPE_OF: Final[Mapping[DatasetFormat, RowShape]] = {shape.format: shape for shape in ROW_SHAPES}

# Columns of a prompt and its answer, as data sets call them; the first pair that all rows have is suggested.
_PAIRS: Final = (
    ("prompt", "completion"), ("question", "answer"), ("prompt", "response"), ("prompt", "answer"),
    ("prompt", "output"), ("instruction", "response"), ("instruction", "completion"), ("query", "response"),
    ("query", "answer"), ("question", "response"), ("problem", "solution"), ("problem", "answer"),
    ("input", "output"), ("input", "target"), ("source", "target"),
)  # fmt: skip
_TEXTS: Final = ("text", "content", "document", "body")
_TURNS: Final = (  # the field of a list of turns, and a key that each turn has
    (DatasetFormat.MESSAGES, "messages", "role"),
    (DatasetFormat.SHAREGPT, "conversations", "from"),
)


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """``fields``: only columns that have another name than the format's own."""

    format: DatasetFormat
    fields: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.fields:
            return f"format: {self.format.value}"
        pairs = ", ".join(f"{name}: {column[:_LONGEST]}" for name, column in self.fields.items())
        return f"format: {self.format.value} with fields: {{{pairs}}}"


class FormatNotDetected(ValueError):
    """``str(error)`` lists the keys that were found and the formats, and says what to write. ``suggestion``: what these
    rows look like, if they look like one format."""

    def __init__(self, message: str, suggestion: NamedFormat | None = None) -> None:
        super().__init__(message)
        self.suggestion = suggestion


def keys_of(rows: Sequence[Row]) -> list[str]:
    """Those that every row has, in the order of the first row."""
    return [name for name in (rows[0] if rows else ()) if all(name in row for row in rows)]


def detected_format(
    rows: Sequence[Row], fields: DatasetFields | None = None, *, text: bool = True
) -> DatasetFormat:
    """Of the first rows, at least one. ``text``: whether the format of that name is allowed. Raises FormatNotDetected."""
    named = fields or DatasetFields()
    keys = keys_of(rows)
    allowed = _allowed(named, text=text)
    fitting = [
        shape
        for shape in allowed
        if all(getattr(named, column) in keys for column in shape.required)
        and _has_labels(rows, shape, named)
    ]
    fitting = [one for one in fitting if not any({*one.required} < {*other.required} for other in fitting)]
    certain = [shape for shape in fitting if not shape.fallback]
    suggestion = _suggested(rows, keys, {shape.format for shape in allowed})
    if len(certain) == 1 and not _has_turns_of_another_kind(rows, certain[0], named):
        return certain[0].format
    if not certain and fitting and (suggestion is None or suggestion.format is fitting[0].format):
        return fitting[0].format
    raise _not_detected(
        rows, keys, named, allowed, certain if len(certain) > 1 else [], suggestion, text=text
    )


def truth_of(label: Any) -> bool | None:
    """What a label says: a boolean, or the word of one as CSV has it. None: it says neither."""
    if isinstance(label, bool):
        return label
    word = label.strip().lower() if isinstance(label, str) else None
    return {"true": True, "false": False}.get(word) if word is not None else None


def _has_labels(rows: Sequence[Row], shape: RowShape, fields: DatasetFields) -> bool:
    if shape.format is not DatasetFormat.UNPAIRED_PREFERENCE or fields.label != DatasetFields().label:
        return True
    return all(truth_of(row[fields.label]) is not None for row in rows)


def _allowed(fields: DatasetFields, *, text: bool) -> list[RowShape]:
    own = DatasetFields()
    renamed = {
        name
        for name in type(own).model_fields
        if name != "weight" and getattr(fields, name) != getattr(own, name)
    }
    allowed = [shape for shape in ROW_SHAPES if renamed <= {*shape.columns}]
    if not allowed:
        listed = ", ".join(sorted(renamed))
        raise FormatNotDetected(
            f"dataset.fields renames columns of several formats ({listed}): set dataset.format, and keep the names of its "
            f"own columns"
        )
    return [shape for shape in allowed if text or shape.format is not DatasetFormat.TEXT]


def _suggested(
    rows: Sequence[Row], keys: list[str], formats: Collection[DatasetFormat]
) -> NamedFormat | None:
    """What the values look like: 1. turns, in a column of any name; 2. instruction and output; 3. a known pair of texts;
    4. a known single text."""
    for name in sorted(keys, key=lambda name: name not in ("messages", "conversations")):
        for format, own, key in _TURNS:
            if format in formats and all(_are_turns(row[name], key) for row in rows):
                return _named(format, {own: name})
    texts = {name for name in keys if all(isinstance(row[name], str) for row in rows)}
    if DatasetFormat.ALPACA in formats and {"instruction", "output"} <= texts:
        return NamedFormat(DatasetFormat.ALPACA)
    for prompt, completion in _PAIRS:
        if DatasetFormat.PROMPT_COMPLETION in formats and {prompt, completion} <= texts:
            return _named(DatasetFormat.PROMPT_COMPLETION, {"prompt": prompt, "completion": completion})
    for name in _TEXTS:
        if DatasetFormat.TEXT in formats and name in texts:
            return _named(DatasetFormat.TEXT, {"text": name})
    return None


def _named(format: DatasetFormat, columns: Mapping[str, str]) -> NamedFormat:
    return NamedFormat(format, {name: column for name, column in columns.items() if name != column})


def _are_turns(value: Any, key: str) -> bool:
    """A file of columns has every key in every turn, so a null is none."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(turn, dict) and turn.get(key) is not None for turn in value)


def _has_turns_of_another_kind(rows: Sequence[Row], shape: RowShape, fields: DatasetFields) -> bool:
    kinds = {format: key for format, _, key in _TURNS}
    if shape.format not in kinds:
        return False
    values = [row[getattr(fields, shape.required[0])] for row in rows]
    others = [key for format, key in kinds.items() if format is not shape.format]
    return any(all(_are_turns(value, key) for value in values) for key in others)


def _not_detected(
    rows: Sequence[Row],
    keys: list[str],
    fields: DatasetFields,
    allowed: Sequence[RowShape],
    candidates: Sequence[RowShape],
    suggestion: NamedFormat | None,
    *,
    text: bool,
) -> FormatNotDetected:
    found = f"they have the keys {_listed(keys)}"
    differing = _differing(rows, allowed, fields)
    if differing is not None and not candidates and suggestion is None:
        listed = " and ".join(
            f"row {place + 1} has the keys {_listed(list(rows[place]))}" for place in differing
        )
        return FormatNotDetected(
            f"the format of the rows cannot be detected, as the rows differ: {listed}. All rows of a task need one format, "
            f"each with all its columns: correct the rows, or give those of each format a task of their own"
        )
    if not keys:
        found = f"they have no key in common (row 1 has {_listed(list(rows[0]))}"
        other = next((place for place, row in enumerate(rows) if not {*rows[0]} <= {*row}), None)
        found += f", row {other + 1} has {_listed(list(rows[other]))})" if other is not None else ")"
    if candidates:
        which = " or ".join(shape.format.value for shape in candidates)
        return FormatNotDetected(f"the rows may be {which}: {found}. Set dataset.format to what they are")
    known = ", ".join(f"{shape.format.value} ({', '.join(shape.required)})" for shape in allowed)
    but = "" if text else "; text takes neither trainOn nor a chat template"
    write = f"write {suggestion}" if suggestion is not None else "set dataset.format and dataset.fields"
    return FormatNotDetected(
        f"the format of the rows cannot be detected: {found}. Formats are {known}{but}. In dataset, {write}",
        suggestion,
    )


def _differing(
    rows: Sequence[Row], allowed: Sequence[RowShape], fields: DatasetFields
) -> tuple[int, int] | None:
    """Places, in order, of two rows of which one has all columns of a format and the other has not; None: of no two."""
    for shape in allowed:
        columns = {getattr(fields, column) for column in shape.required}
        whole = [columns <= {*row} for row in rows]
        if any(whole) and not all(whole):
            first, second = sorted((whole.index(True), whole.index(False)))
            return first, second
    return None


def _listed(keys: Sequence[str]) -> str:
    shown = ", ".join(repr(key[:_LONGEST]) for key in keys[:_SHOWN])
    return (shown or "none") + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")
