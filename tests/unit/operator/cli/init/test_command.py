"""`mlora init`: what it writes passes `mlora validate`, whatever the rows' columns are called."""

from __future__ import annotations

import csv
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.cli import exit_codes
from tests.fixtures.spoken import Spoken, mlora

TURN = {"role": "user", "content": "2+2?"}
SHARED = {"from": "human", "value": "2+2?"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def jsonl(*rows: object, name: str = "rows.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def init(*arguments: str) -> Spoken:
    return mlora("init", "--model", "acme/base", *arguments)


def written(file: str = "task.yaml") -> dict[str, Any]:
    assert mlora("validate", file).code == 0
    spec: dict[str, Any] = yaml.safe_load(Path(file).read_text())["spec"]
    LoRATaskSpec.model_validate(spec)
    return spec


def test_answers_with_a_label_get_the_objective_that_learns_from_them() -> None:
    row = {"prompt": "a", "completion": "b", "label": True}
    assert init("--data", jsonl(row, row | {"label": False})).code == 0
    assert written()["training"]["objective"]["type"] == "kto"


@pytest.mark.parametrize(
    ("row", "format", "fields"),
    [
        ({"prompt": "a", "completion": "b"}, "promptCompletion", None),
        (
            {"id": 7, "question": "a", "answer": "b"},
            "promptCompletion",
            {"prompt": "question", "completion": "answer"},
        ),
        ({"messages": [TURN]}, "messages", None),
        ({"text": "a", "chat: log": [TURN]}, "messages", {"messages": "chat: log"}),
        ({"conversations": [SHARED]}, "sharegpt", None),
        ({"conversations": [TURN]}, "messages", {"messages": "conversations"}),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca", None),
        ({"input": "a", "output": "b"}, "promptCompletion", {"prompt": "input", "completion": "output"}),
        ({"text": "a"}, "text", None),
        ({"title": "a", "body": "b"}, "text", {"text": "body"}),
        ({"prompt": "a", "completion": "b", "label": True}, "unpairedPreference", None),
    ],
)
def test_format_and_fields_are_detected(
    row: dict[str, Any], format: str, fields: dict[str, str] | None
) -> None:
    assert init("--data", jsonl(row, row)).code == 0
    dataset = written()["dataset"]
    assert (dataset["format"], dataset.get("fields")) == (format, fields)


def test_every_kind_of_file_is_read(folder: Path) -> None:
    row = {"question": "a", "answer": "b"}
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    (folder / "a.json").write_text("\n " + json.dumps([row, row]))
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([list(row), list(row.values())])
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist([row])
    parquet.write_table(table, folder / "a.parquet")
    for name in ("a.jsonl.gz", "a.json", "a.csv", "a.parquet"):
        assert init("--data", name, "--force").code == 0, name
        spec = written()
        assert spec["dataset"]["fields"] == {"prompt": "question", "completion": "answer"}, name
        assert spec["dataset"]["uri"] == (folder / name).as_uri()
    assert spec["output"]["uri"] == (folder / "adapters" / "a").as_uri()


def test_a_file_is_not_replaced_unless_the_user_says_so() -> None:
    Path("task.yaml").write_text("mine")
    said = init("--data", jsonl({"text": "a"}))
    assert said.code == exit_codes.INVALID
    assert "task.yaml exists: give --force to replace it" in said.err
    assert Path("task.yaml").read_text() == "mine"
    assert init("--data", "rows.jsonl", "--force").code == 0
    assert written()["baseModel"] == "acme/base"


def test_standard_output_gets_the_manifest_and_nothing_else() -> None:
    said = init("-", "--data", jsonl({"text": "a"}))
    assert yaml.safe_load(said.out)["metadata"]["name"] == "rows"
    assert said.err == ""


def test_what_columns_are_called_makes_no_line_of_the_file() -> None:
    evil = "x\nspec: {}\n\x1b[2J"
    assert init("--data", jsonl({"text": "a", evil: "b"})).code == 0
    written()
    assert "\nspec: {}" not in Path("task.yaml").read_text()
    assert "\x1b" not in Path("task.yaml").read_text()


def test_rows_that_are_elsewhere_need_a_format() -> None:
    assert init("--data", "s3://data/Chats of May.jsonl").code == exit_codes.INVALID
    assert not Path("task.yaml").exists()
    said = init("--data", "s3://data/rows.jsonl", "--format", "promptCompletion", "--field", "prompt=q")
    assert said.code == 0
    spec = written()
    assert (spec["dataset"]["uri"], spec["dataset"]["fields"]) == ("s3://data/rows.jsonl", {"prompt": "q"})
    assert spec["output"]["uri"] == "s3://adapters/rows"


def test_a_model_is_named_by_its_folder_or_its_address(folder: Path) -> None:
    (folder / "smollm2").mkdir()
    data = jsonl({"text": "a"})
    for model, name in (("./smollm2", "smollm2"), ("hf://acme/base@main", "acme/base")):
        assert mlora("init", "--model", model, "--data", data, "--force").code == 0
        assert written()["baseModel"] == name
        assert f"--model {name}={model}" in Path("task.yaml").read_text()


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (
            [{"a": "b", "c": "d"}],
            [],
            "keys 'a', 'c'. Formats are promptCompletion (prompt, completion), messages",
        ),
        ([["a"]], [], "a row must be an object"),
        ([], [], "the file has no rows"),
        ([{"text": "a"}], ["--name", "Not_A_Name"], "metadata.name"),
        ([{"text": "a"}], ["--field", "text=a"], "--field needs --format"),
    ],
)
def test_what_makes_no_task_is_refused_and_nothing_is_written(
    rows: list[Any], options: list[str], words: str
) -> None:
    said = init("--data", jsonl(*rows), *options)
    assert said.code == exit_codes.INVALID
    assert words in said.err
    assert not Path("task.yaml").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}'.encode("utf-16"), "not text in UTF-8: save it in that encoding"),
        (b'{"text": "\xff"}', "not text in UTF-8: save it in that encoding"),
        (b"\n<html><body>log in", "line 2 is not JSON (Expecting value): <html><body>log in"),
        (b'{"text": "a"}\n{"text"', "line 2 is not JSON (Expecting ':' delimiter): {\"text\""),
        (None, "it is a folder: give a file of rows"),
    ],
)
def test_what_holds_no_rows_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "rows.jsonl"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    said = init("--data", str(file))
    assert said.code == exit_codes.INVALID
    assert words in said.err


def test_rows_of_a_pipe_are_refused_in_words(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for data in (str(tmp_path / "pipe"), "-"):
        assert "rows cannot come from a pipe here" in init("--data", data).err
