"""What a page shows to be pasted: manifests that the schema takes, values that the chart takes, commands that there are."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
from pydantic import ValidationError

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.cli.app import app
from mlora_operator.cli.fetch.command import parser as fetch_parser
from mlora_operator.local.documents import parse
from mlora_operator.local.manifests import read_manifests

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
VALUES = json.loads((ROOT / "charts" / "mlora-operator" / "values.schema.json").read_text())


def fences(kind: str) -> Iterator[tuple[str, str]]:
    """Page and text of each fence of a kind."""
    for page in PAGES:
        for fence in _FENCE.finditer(page.read_text()):
            if fence["kind"] == kind:
                yield str(page.relative_to(ROOT)), textwrap.dedent(fence["text"])


SNIPPETS = [(page, text) for page, text in fences("yaml")]


def schema_of(model: type[Any]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


TASK, PIPELINE = schema_of(LoRATaskSpec), schema_of(LoRAPipelineSpec)
# What makes a whole spec of a part.
WHOLE_TASK = {"baseModel": "m", "dataset": {"uri": "s3://d/a"}, "output": {"uri": "s3://o/a"}}
WHOLE_PIPELINE = {"model": {"name": "m", "uri": "s3://m/m"}}


def dataset_with(fields: dict[str, Any]) -> dict[str, Any]:
    return {**WHOLE_TASK["dataset"], **fields}  # type: ignore[dict-item]


READERS: tuple[tuple[set[str], Callable[[dict[str, Any]], object]], ...] = (
    (set(VALUES["properties"]), lambda value: jsonschema.validate(value, VALUES)),
    (PIPELINE, lambda value: LoRAPipelineSpec.model_validate({**WHOLE_PIPELINE, **value})),
    (
        TASK,
        lambda value: LoRATaskSpec.model_validate(
            {**WHOLE_TASK, **value, "dataset": dataset_with(value.get("dataset", {}))}
        ),
    ),
    (
        {"fields", "chatTemplate"},
        lambda value: LoRATaskSpec.model_validate({**WHOLE_TASK, "dataset": dataset_with(value)}),
    ),
)


@pytest.mark.parametrize(
    ("page", "text"), SNIPPETS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(SNIPPETS)]
)
def test_a_snippet_of_yaml_is_taken_by_what_it_is_for(page: str, text: str) -> None:
    (value,) = [document.value for document in parse(text)]
    keys = set(value)
    if "kind" in keys:
        found = read_manifests([(page, text)])
        assert [str(problem) for problem in found.problems] == []
        assert len(found.tasks) + len(found.pipelines) == 1
        return
    if keys == {"spec"}:
        value, keys = value["spec"], set(value["spec"])
    readers = [read for fields, read in READERS if keys <= fields]
    assert readers, f"of what are these fields? {sorted(keys)}"
    problems = [problem for read in readers if (problem := _problem(read, value)) is not None]
    assert len(problems) < len(readers), problems


def _problem(read: Callable[[dict[str, Any]], object], value: dict[str, Any]) -> str | None:
    try:
        read(value)
    except (ValidationError, jsonschema.ValidationError) as error:
        return str(error)
    return None


MLORA: Any = typer.main.get_command(app)
# A command and what goes on behind a backslash; up to a pipe or a comment.
_COMMAND = re.compile(
    rf"(?:^|[\s(])(?:\$ )?(?:\.venv/bin/|kubectl )?mlora ({'|'.join(MLORA.commands)})\b([^\n|#&]*)",
    re.MULTILINE,
)
_VARIABLE = re.compile(r'"?\$\(.*?\)"?|\$\{?[A-Z_]+(?:::8)?\}?')


def commands() -> Iterator[tuple[str, str, list[str]]]:
    for page in PAGES:
        for fence in _FENCE.finditer(page.read_text()):
            if fence["kind"] in ("", "console"):
                text = fence["text"].replace("\\\n", " ")
                for name, rest in _COMMAND.findall(text):
                    yield str(page.relative_to(ROOT)), name, shlex.split(_VARIABLE.sub("x", rest))


COMMANDS = list(commands())


@pytest.mark.parametrize(
    ("page", "name", "words"),
    COMMANDS,
    ids=[f"{page}-{name}-{n}" for n, (page, name, _) in enumerate(COMMANDS)],
)
def test_a_command_is_one_that_there_is(page: str, name: str, words: list[str]) -> None:
    assert page
    if name == "fetch":
        fetch_parser().parse_args(words)
    else:
        MLORA.commands[name].make_context(name, words)


def test_there_are_snippets_and_commands_of_each_kind() -> None:
    assert len(SNIPPETS) > 15
    assert {name for _, name, _ in COMMANDS} == set(MLORA.commands)
