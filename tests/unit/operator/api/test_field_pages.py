"""The tables of docs/ have every field of both specs, with the default and the bounds that the API server applies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlora_operator.api import crd
from tests.fixtures.pod_fields import is_of_a_pod

DOCS = Path(__file__).parents[4] / "docs"
JSON = Mapping[str, Any]

# Kind, page, heading above the table, and what stands before its fields.
TABLES = (
    ("LoRATask", "users/tasks.md", "## spec", ""),
    ("LoRATask", "users/tasks.md", "### lora", "lora."),
    ("LoRATask", "users/tasks.md", "### dataset", "dataset."),
    ("LoRATask", "users/tasks.md", "### training", "training."),
    ("LoRATask", "users/tasks.md", "### storage", "storage."),
    ("LoRATask", "users/evaluation.md", "# Evaluation", "evaluation."),
    ("LoRAPipeline", "operators/pipelines.md", "## spec", ""),
    ("LoRAPipeline", "operators/storage.md", "# Storage", "storage."),
)
STATUS_TABLES = {"LoRATask": "users/tasks.md", "LoRAPipeline": "operators/pipelines.md"}
_SHORT = 32  # characters of a duration or a quantity: nobody needs more
# What a table says about all fields below.
WHOLE = {"dataset.fields", "lora.rankPattern", "lora.alphaPattern"}


def schema_of(kind: str, part: str) -> JSON:
    definitions = {one["spec"]["names"]["kind"]: one for one in (crd.task_crd(), crd.pipeline_crd())}
    (version,) = definitions[kind]["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"][part]  # type: ignore[no-any-return]


def leaves(schema: JSON, path: str = "") -> Iterator[tuple[str, JSON]]:
    """Fields that have no fields of their own, by path."""
    for name, child in schema["properties"].items():
        here = f"{path}{name}"
        if "properties" in child and here not in WHOLE and not is_of_a_pod(f"{here}."):
            yield from leaves(child, f"{here}.")
        else:
            yield here, child


def rows(page: str, heading: str) -> Iterator[dict[str, str]]:
    """The first table below a heading whose first column is called field: cells by the column's name."""
    part = ("\n" + (DOCS / page).read_text()).partition(f"\n{heading}\n")[2]
    table = re.search(r"^\| field \|.*\n(?:\|.*\n)+", part, re.MULTILINE)
    assert table is not None, f"{page}: no table of fields below {heading!r}"
    head, _, *body = (re.split(r"(?<!\\)\|", line.strip()[1:-1]) for line in table[0].splitlines())
    for cells in body:
        yield {name.strip(): cell.strip() for name, cell in zip(head, cells, strict=True)}


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def described() -> dict[tuple[str, str], dict[str, str]]:
    """The row of each field, by kind and path."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for kind, page, heading, prefix in TABLES:
        for row in rows(page, heading):
            for name in names(row["field"]):
                path = (prefix + name).removesuffix(".*")
                assert (kind, path) not in found, f"{page}: {path} has two rows"
                found[kind, path] = row
    return found


DESCRIBED = described()
FIELDS = {
    (kind, path): schema
    for kind in ("LoRATask", "LoRAPipeline")
    for path, schema in leaves(schema_of(kind, "spec"))
}


def objects(kind: str) -> set[str]:
    """Paths of what has fields of its own."""
    return {path.rpartition(".")[0] for one, path in FIELDS if one == kind and "." in path}


def test_every_field_has_a_row_and_every_row_is_of_a_field() -> None:
    assert {key for key in FIELDS if key not in DESCRIBED} == set(), "fields without a row"
    unknown = {
        (kind, path) for kind, path in DESCRIBED if (kind, path) not in FIELDS and path not in objects(kind)
    }
    assert unknown == set(), "rows of fields that are not there"


@pytest.mark.parametrize(("kind", "path"), FIELDS, ids=lambda part: str(part))
def test_the_row_has_the_default_and_the_bounds_that_apply(kind: str, path: str) -> None:
    schema, row = FIELDS[kind, path], DESCRIBED[kind, path]
    told = row["default"].replace(",", "") if path not in WHOLE else ""
    default = schema.get("default")
    if default not in (None, [], {}) and path not in WHOLE:
        assert _written(default).replace(",", "") in told, f"{path}: the default is {default}, not {told}"
    if "bounds" not in row:
        return
    bounds = row["bounds"].replace(",", "").replace("`", "")
    for word in schema.get("enum", ()):
        assert re.search(rf"(?<!\w){word}(?!\w)", bounds), f"{path}: may be {word}"
    limits = {schema.get(key) for key in ("minimum", "maximum", "maxLength", "maxItems")} - {None, _SHORT}
    if "enum" not in schema and "bool" not in schema.get("type", ""):
        numbers = {float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", bounds)}
        assert limits <= numbers, f"{path}: bounds are {sorted(limits)}, told are {sorted(numbers)}"


def _written(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("kind", STATUS_TABLES)
def test_the_page_has_every_field_of_the_status(kind: str) -> None:
    told = {name for row in rows(STATUS_TABLES[kind], "## status") for name in names(row["field"])}
    assert told == set(schema_of(kind, "status")["properties"])
