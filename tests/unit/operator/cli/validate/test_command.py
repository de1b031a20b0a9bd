"""`mlora validate` tells people and programs the same, and ends with a number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlora_operator.cli.app import app

EXAMPLES = Path(__file__).parents[5] / "examples"
MANIFESTS = sorted(file for file in EXAMPLES.glob("*.yaml") if "values" not in file.name)
BAD = (EXAMPLES / "quickstart.yaml").read_text().replace("rank: 8", 'rank: "8"', 1)


def invoke(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["validate", *arguments], input=stdin)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_every_example_is_valid(file: Path) -> None:
    code, output, _ = invoke(str(file))
    assert code == 0
    assert output.startswith("valid: ")


def test_a_problem_is_a_line_with_file_line_object_and_field(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(BAD)
    line = BAD[: BAD.index('rank: "8"')].count("\n") + 1
    code, output, errors = invoke(str(file))
    assert (code, output) == (2, "")
    assert f"{file}:{line}: LoRATask/math-small spec.lora.rank: " in errors
    assert "1 problem" in errors


def test_json_says_the_same_to_programs() -> None:
    code, output, _ = invoke("-", "--output", "json", stdin=BAD)
    said = json.loads(output)
    assert code == 2
    assert said["valid"] is False
    (problem,) = said["problems"]
    assert (problem["file"], problem["field"]) == ("standard input", "spec.lora.rank")
    assert len(said["objects"]) == 2


def test_objects_of_others_are_named_and_not_judged() -> None:
    code, _, errors = invoke("-", stdin="apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n")
    assert code == 0
    assert "Namespace/a is not an mLoRA object and was not checked" in errors


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"], ids=["missing", "binary"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "f.yaml"
    if content is not None:
        file.write_bytes(content)
    result = CliRunner().invoke(app, ["validate", str(file)])
    assert result.exception is not None
    assert str(file) in str(result.exception)
    assert getattr(result.exception, "exit_code", None) == 2


def test_markup_in_a_manifest_is_shown_as_it_is() -> None:
    code, _, errors = invoke("-", stdin=BAD.replace('"8"', '"[red]8"'))
    assert code == 2
    assert "[red]8" in errors
