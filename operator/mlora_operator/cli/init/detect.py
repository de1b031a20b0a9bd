"""Which ``dataset.format`` rows have, and which columns they call otherwise. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlora_worker.protocol import DatasetFormat

Row = Mapping[str, Any]

# Columns of a prompt and its answer, as data sets call them; the first pair that all rows have is taken.
_PAIRS = (
    ("prompt", "completion"), ("question", "answer"), ("prompt", "response"), ("prompt", "answer"),
    ("prompt", "output"), ("instruction", "response"), ("instruction", "completion"), ("query", "response"),
    ("query", "answer"), ("question", "response"), ("problem", "solution"), ("problem", "answer"),
    ("input", "output"), ("input", "target"), ("source", "target"),
)  # fmt: skip
_TEXTS = ("text", "content", "document", "body")


@dataclass(frozen=True, slots=True)
class DetectedFormat:
    """``fields``: only columns that are not called as the format calls them."""

    format: DatasetFormat
    fields: Mapping[str, str] = field(default_factory=dict)


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Those that every row has, in the order of the first row."""
    return [name for name in (rows[0] if rows else ()) if all(name in row for row in rows)]


def detected(rows: Sequence[Row]) -> DetectedFormat | None:
    """None when the columns do not tell.

    1. A column with turns of role and content: ``messages``; with turns of from and value: ``sharegpt``.
    2. Texts called instruction and output: ``alpaca``.
    3. A known pair of texts: ``promptCompletion``.
    4. A known single text: ``text``.
    """
    columns = columns_of(rows)
    for name in sorted(columns, key=lambda name: name not in ("messages", "conversations")):
        values = [row[name] for row in rows]
        if all(_are_turns(value, "role", "content") for value in values):
            return _named(DatasetFormat.MESSAGES, messages=name)
        if all(_are_turns(value, "from", "value") for value in values):
            return _named(DatasetFormat.SHAREGPT, conversations=name)
    texts = {name for name in columns if all(isinstance(row[name], str) for row in rows)}
    if {"instruction", "output"} <= texts:
        return DetectedFormat(DatasetFormat.ALPACA)
    for prompt, completion in _PAIRS:
        if {prompt, completion} <= texts:
            return _named(DatasetFormat.PROMPT_COMPLETION, prompt=prompt, completion=completion)
    for name in _TEXTS:
        if name in texts:
            return _named(DatasetFormat.TEXT, text=name)
    return None


def _named(format: DatasetFormat, **columns: str) -> DetectedFormat:
    return DetectedFormat(format, {name: column for name, column in columns.items() if name != column})


def _are_turns(value: Any, *keys: str) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and all(key in turn for key in keys) for turn in value)
    )
