"""Rules about the columns that ``dataset.fields`` names: which format has which, and that no two are one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from mlora_operator.api.rule import Rule
from mlora_worker.protocol import ROW_SHAPES, DatasetFields, RowShape

# Columns of each format: another name for any other one would have no effect.
FIELDS_OF: Mapping[str, tuple[str, ...]] = {
    field: tuple(shape.format.value for shape in ROW_SHAPES if field in shape.columns)
    for field in DatasetFields.model_fields
    if field != "weight"
}


def _of_its_format(field: str, formats: tuple[str, ...]) -> Rule:
    listed = ", ".join(f"'{one}'" for one in formats)
    return Rule(
        path=("dataset",),
        cel=f"!has(self.format) || self.format in [{listed}] || self.fields.{field} == '{field}'",
        message=f"fields.{field} applies only to format {' and '.join(formats)}: remove it, or correct format",
        holds=lambda dataset: (
            dataset.get("format", formats[0]) in formats or dataset["fields"][field] == field
        ),
    )


def _apart(shape: RowShape) -> Rule:
    """Two columns of one name would make the answer its own prompt, or a pair of equal answers. Where the format is left
    out, it has both if a field is renamed that no format without both has; what remains is refused once the rows have told
    it.
    """
    twins = tuple(itertools.combinations(shape.columns, 2))

    def own(pair: tuple[str, str]) -> tuple[str, ...]:
        """Fields that no format has which lacks one of the two. The first format that has both says it."""
        if shape is not next(one for one in ROW_SHAPES if {*pair} <= {*one.columns}):
            return ()
        return tuple(
            name for name in pair if all({*FIELDS_OF[name]} <= {*FIELDS_OF[other]} for other in pair)
        )

    def allowed(one: str, other: str) -> str:
        kept = " && ".join(f"self.fields.{name} == '{name}'" for name in own((one, other)))
        unless = f"(!has(self.format) && {kept})" if kept else "!has(self.format)"
        return f"(self.fields.{one} != self.fields.{other} || {unless})"

    def holds(dataset: Mapping[str, Any]) -> bool:
        fields = dataset["fields"]
        same = [pair for pair in twins if fields[pair[0]] == fields[pair[1]]]
        if "format" in dataset:
            return dataset["format"] != shape.format.value or not same
        return not any(fields[name] != name for pair in same for name in own(pair))

    return Rule(
        path=("dataset",),
        cel=f"(has(self.format) && self.format != '{shape.format.value}') || "
        f"({' && '.join(allowed(*pair) for pair in twins)})",
        message=f"of format {shape.format.value}, fields {', '.join(shape.columns)} must each name another column: "
        "correct fields",
        holds=holds,
        new_alone=True,
    )


COLUMN_RULES: tuple[Rule, ...] = (
    *(_of_its_format(field, formats) for field, formats in FIELDS_OF.items()),
    *(_apart(shape) for shape in ROW_SHAPES if len(shape.columns) > 1),
)
