"""What reports ask of MLflow and Weights & Biases, held against their documented behaviour (tests/fixtures/trackers.py).

``test_mlflow.py`` and ``test_wandb.py`` do the same with the libraries themselves, where they are installed.
"""

from __future__ import annotations

import importlib
import inspect
import json
import operator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlora_operator.reporting.curves import Finished, Point, ReportError, by_curve
from tests.fixtures import trackers
from tests.fixtures.trackers import SIGNATURES, MlflowClient, Wandb, reporter_with

SERVER = "http://mlflow.example:5000"


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(MlflowClient, "servers", {})
    return reporter_with(
        monkeypatch,
        "mlflow",
        {
            "mlflow": {"MlflowClient": MlflowClient},
            "mlflow.entities": {"Metric": trackers.Metric, "Param": trackers.Param},
            "mlflow.exceptions": {"MlflowException": trackers.MlflowError},
        },
    )


def tracked() -> list[trackers.TrackedRun]:
    return MlflowClient.servers[SERVER]["adapters"]


def curves(run: trackers.TrackedRun) -> dict[str, dict[int, float]]:
    got: dict[str, dict[int, float]] = {}
    for metric in run.metrics:
        assert metric.step not in got.setdefault(metric.key, {}), "a step twice"
        got[metric.key][metric.step] = metric.value
    return got


def test_mlflow_has_a_task_as_one_run_with_each_point_once(mlflow: Any, finished: Finished) -> None:
    live = mlflow.TrackedRun(SERVER, finished.run, "adapters")
    live.add([Point("train/loss", 3, 2.5)])
    assert live.complete(finished) == len(finished.points) - 1
    assert mlflow.TrackedRun(SERVER, finished.run, "adapters").complete(finished) == 0
    (run,) = tracked()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "team-a/support-bot")
    assert run.params == {"r": "8", "lora_alpha": "16", "target_modules": "q_proj, v_proj"}
    assert curves(run) == by_curve(finished.points)
    mlflow.TrackedRun(SERVER, replace(finished.run, uid="another"), "adapters").failed()
    assert [run.info.status for run in tracked()] == ["FINISHED", "FAILED"]


def test_mlflow_is_given_no_more_than_it_takes_at_once(mlflow: Any, finished: Finished) -> None:
    points = tuple(Point("train/loss", step, 1 / step) for step in range(1, 2502))
    reporter = mlflow.TrackedRun(SERVER, finished.run, "adapters")
    assert reporter.complete(replace(finished, points=points)) == 2501
    assert curves(tracked()[0]) == by_curve(points)


def test_what_mlflow_refuses_is_told_with_its_address(mlflow: Any, finished: Finished) -> None:
    with pytest.raises(ReportError, match="mlflow: file:///runs rejected the report: no server"):
        mlflow.TrackedRun("file:///runs", finished.run, "adapters")


def wandb_with(monkeypatch: pytest.MonkeyPatch, mode: str) -> tuple[Any, Wandb]:
    fake = Wandb(mode)
    content = {"setup": fake.setup, "init": fake.init, "Settings": SimpleNamespace}
    errors = {"Error": trackers.WandbError}
    return reporter_with(monkeypatch, "wandb", {"wandb": content, "wandb.errors": errors}), fake


def logged(history: list[Any]) -> dict[str, dict[int, float]]:
    return by_curve(
        [Point(curve, step, value) for step, values in history for curve, value in values.items()]
    )


def test_wandb_gets_a_history_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, finished: Finished
) -> None:
    wandb, fake = wandb_with(monkeypatch, "online")
    for written in (len(finished.points), 0):
        reporter = wandb.LoggedRun("acme/adapters", finished.run, str(tmp_path))
        reporter.add([Point("train/loss", 3, 2.5)])
        assert reporter.complete(finished) == written
        assert reporter.place() == f"https://wandb.example/{finished.run.uid}"
    (run,) = fake.runs.values()
    assert logged(run.history) == by_curve(finished.points)
    assert (run.started["entity"], run.started["project"]) == ("acme", "adapters")
    assert run.started["config"] == {**finished.settings, "uid": finished.run.uid}


def test_wandb_offline_is_one_whole_folder_that_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, finished: Finished
) -> None:
    wandb, _ = wandb_with(monkeypatch, "offline")
    assert wandb.LoggedRun("adapters", finished.run, str(tmp_path)).complete(finished) == len(finished.points)
    again = wandb.LoggedRun("adapters", finished.run, str(tmp_path))
    assert again.complete(finished) == 0
    (folder,) = (tmp_path / "wandb").iterdir()
    assert again.place() == f"wandb sync {folder}"
    (file,) = folder.iterdir()
    assert logged(json.loads(file.read_text())) == by_curve(finished.points)


def test_wandb_that_is_switched_off_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, finished: Finished
) -> None:
    wandb, _ = wandb_with(monkeypatch, "disabled")
    with pytest.raises(ReportError, match="it is disabled"):
        wandb.LoggedRun("adapters", finished.run, str(tmp_path)).complete(finished)


@pytest.mark.parametrize("library", SIGNATURES)
def test_the_libraries_take_these_calls(library: str) -> None:
    real: Any = pytest.importorskip(library, reason=f"needs mlora-operator[{library}]")
    if library == "mlflow":
        importlib.import_module("mlflow.entities")
    for name, parameters in SIGNATURES[library].items():
        taken = inspect.signature(operator.attrgetter(name)(real)).parameters
        assert set(parameters) <= set(taken), name
