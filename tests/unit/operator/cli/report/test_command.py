"""`mlora report`: who is told what, and how it ends."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlora_operator.cli import exit_codes
from mlora_operator.cli.app import app
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.report.reporters import Reports
from mlora_operator.reporting.curves import Finished, Point, Run
from mlora_operator.reporting.targets import ReportTarget
from tests.fixtures.reported import write_adapter

TENSORBOARD = "tensorboard:runs"


class Recorded:
    """A reporter that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def add(self, points: Sequence[Point]) -> None:
        self.told += points

    def complete(self, finished: Finished) -> int:
        raise NotImplementedError

    def failed(self) -> None:
        self.told.append("failed")

    def place(self) -> str:
        raise NotImplementedError


def task(uid: str = "u", failed: bool = False, succeeded: bool = False, **status: Any) -> dict[str, Any]:
    ends = {"Failed": failed, "Succeeded": succeeded}
    conditions = [{"type": type_, "status": "True" if holds else "False"} for type_, holds in ends.items()]
    return {
        "metadata": {"uid": uid, "namespace": "team-a", "name": "bot"},
        "spec": {"baseModel": "acme/tiny"},
        "status": {"state": "Training", "conditions": conditions, **status},
    }


def test_a_task_that_trains_is_told_of_by_its_newest_loss_and_a_failed_one_by_its_end() -> None:
    opened: list[tuple[ReportTarget, Run, Recorded]] = []

    def open_(target: ReportTarget, run: Run, _: object) -> Recorded:
        opened.append((target, run, Recorded()))
        return opened[-1][2]

    targets = [ReportTarget("tensorboard", "runs"), ReportTarget("mlflow", "http://x")]
    reports = Reports(targets, open_, {})
    reports.seen(task(state="Queued", step=0))  # no loss yet
    assert opened == []
    reports.seen(task(step=3, loss="2.5000"))
    reports.seen(task(step=4))  # a step without a supervised token
    reports.seen(task(step=5, loss="2.2500"))
    reports.seen(task(step=6, loss="2.0000", succeeded=True))  # the whole history comes instead
    reports.seen(task(step=6, loss="2.0000", failed=True))
    run = Run("u", "team-a", "bot", "acme/tiny")
    wanted = [Point("train/loss", 3, 2.5), Point("train/loss", 5, 2.25), "failed"]
    assert [(target, of, recorded.told) for target, of, recorded in opened] == [
        (target, run, wanted) for target in targets
    ]
    reports.seen(task("another", step=1, loss="3.0000"))  # deleted and made anew meanwhile
    assert [(of.uid, recorded.told) for _, of, recorded in opened[2:]] == [
        ("another", [Point("train/loss", 1, 3.0)])
    ] * 2


@pytest.mark.parametrize(
    ("arguments", "told", "code"),
    [
        (["./x"], "--to is missing", exit_codes.INVALID),
        (["./x", "--to", "aim:x"], "is not a valid target", exit_codes.INVALID),
        (["./x", "--to", TENSORBOARD, "--follow"], "a published adapter is finished", exit_codes.INVALID),
        (["./x", "--to", TENSORBOARD], "no finished adapter", exit_codes.NOT_FOUND),
        (["gs://x", "--to", TENSORBOARD], "is not the address", exit_codes.INVALID),
    ],
)  # fmt: skip
def test_what_cannot_be_reported_ends_with_its_own_number(arguments: list[str], told: str, code: int) -> None:
    result = CliRunner().invoke(app, ["report", *arguments])
    if isinstance(result.exception, CommandError):  # `main` prints it
        assert (told in str(result.exception), result.exception.exit_code) == (True, code)
    else:
        assert (told in result.output, result.exit_code) == (True, code)


def test_an_adapters_folder_is_reported_and_said_how_much_of_it_was_new(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "support-bot")
    arguments = ["report", str(adapter), "--to", f"tensorboard:{tmp_path / 'runs'}"]
    assert "16 of 16 points are new" in CliRunner().invoke(app, arguments, catch_exceptions=False).output
    again = json.loads(CliRunner().invoke(app, [*arguments, "--output", "json"]).output)
    assert (again["new"], again["points"], again["run"]) == (0, 16, "team-a/support-bot")
    (adapter / "history.jsonl").write_text("")
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, CommandError)
    assert error.exit_code == exit_codes.CORRUPT


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed here")
def test_a_missing_library_is_told_before_anything_is_asked() -> None:
    error = CliRunner().invoke(app, ["report", "some-task", "--to", "wandb:p"]).exception
    assert isinstance(error, CommandError)
    assert (error.exit_code, "mlora-operator[wandb]" in str(error)) == (exit_codes.INVALID, True)


def test_without_a_place_it_says_how_one_is_written() -> None:
    found = CliRunner().invoke(app, ["report", "got"])
    assert isinstance(found.exception, CommandError)
    assert found.exception.exit_code == exit_codes.INVALID
    assert "mlora report got --to KIND:PLACE" in str(found.exception)
    assert "tensorboard:FOLDER" in str(found.exception)


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_that_is_taken_for_a_task_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    if there:
        (tmp_path / "got").mkdir()
    found = CliRunner().invoke(app, ["report", "got", "--to", TENSORBOARD])
    assert isinstance(found.exception, CommandError)
    assert found.exception.exit_code == exit_codes.UNREACHABLE
    assert str(found.exception).startswith("no kubeconfig at ")
    assert ("for the adapter in the folder here write ./got" in str(found.exception)) is there
