"""What `mlora run` refuses before it starts anything."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlora_operator.cli.app import app
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.run.command import log_to

TASK = """\
apiVersion: mlora.dev/v1alpha1
kind: LoRATask
metadata: {name: a}
spec: {baseModel: m, dataset: {uri: "s3://d/a"}, output: {uri: "s3://o/a"}}
"""


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (TASK, [], "the location of m is not known: add --model m=FOLDER"),
        (TASK, ["--model", "m"], "expected NAME=PLACE"),
        (TASK, ["--model", "m=/nowhere"], "is not the folder of a model"),
        (TASK, ["--model", "m=ftp://x"], "must be a folder or an address with s3://"),
        (TASK, ["--model", "m=hf://owner"], "--model m=hf://owner: uri: must be a folder such as s3://"),
        (TASK, ["--model", "m=s3://"], "--model m=s3://: uri: must be a folder such as s3://"),
        (
            TASK,
            ["--model", "m=s3://b/m", "--s3-endpoint", "127.0.0.1:8333"],
            "--s3-endpoint 127.0.0.1:8333: endpoint: must be a URL such as https://",
        ),
        (
            TASK,
            ["--model", "m=s3://b/m", "--threads", "1025"],
            "threads: Input should be less than or equal to 1024",
        ),
        (
            TASK,
            ["--model", "m=s3://b/m", "--state", "/dev/null/state"],
            "--state /dev/null/state: Not a directory",
        ),
        (TASK, ["--model", "m=s3://b/m", "--state", "/dev/null"], "--state /dev/null: File exists"),
        (TASK.replace("name: a", "name: A"), ["--model", "m=s3://b/m"], "metadata.name"),
        ("apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n", [], "these files contain no LoRATask"),
    ],
)
def test_invalid_input_ends_with_2_and_says_what_to_change(
    tmp_path: Path, text: str, options: list[str], words: str
) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["run", str(file), *options])
    assert isinstance(result.exception, CommandError)
    assert result.exception.exit_code == 2
    assert words in str(result.exception)


def test_a_record_of_the_operators_log_is_one_line_whatever_others_say(tmp_path: Path) -> None:
    logger = logging.getLogger("mlora_operator")
    former = logger.handlers, logger.level, logger.propagate
    try:
        log_to(tmp_path / "operator.log")
        logger.warning("a worker said: %s", "x\n2026-01-01 ERROR forged\x1b[2J\r")
    finally:
        for handler in logger.handlers:
            handler.close()
        logger.handlers, logger.level, logger.propagate = former
    (line,) = (tmp_path / "operator.log").read_text(encoding="utf-8").splitlines()
    assert "forged" in line
    assert "\x1b" not in line
