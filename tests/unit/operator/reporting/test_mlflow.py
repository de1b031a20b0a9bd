"""What MLflow has, in a database of its own, whatever is reported how often."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlflow", reason="needs mlora-operator[mlflow]")
pytest.importorskip("sqlalchemy", reason="needs the whole mlflow, which keeps runs in a database")

from mlflow import MlflowClient

from mlora_operator.reporting.curves import Finished, Point, ReportError, by_curve
from mlora_operator.reporting.mlflow import TrackedRun


def found(uri: str) -> list[Any]:
    client: Any = MlflowClient(tracking_uri=uri)
    return list(client.search_runs([client.get_experiment_by_name("adapters").experiment_id]))


def curves(uri: str, run_id: str, names: Any) -> dict[str, dict[int, float]]:
    client: Any = MlflowClient(tracking_uri=uri)
    got = {}
    for name in names:
        points = client.get_metric_history(run_id, name)
        got[name] = {one.step: one.value for one in points}
        assert len(points) == len(got[name]), f"{name} has a step twice"
    return got


def test_a_task_is_one_run_with_each_point_once(tmp_path: Path, finished: Finished) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    live = TrackedRun(uri, finished.run, "adapters")
    live.add([Point("train/loss", 3, 2.5)])
    (run,) = found(uri)
    assert (run.info.status, run.info.run_name) == ("RUNNING", "team-a/support-bot")

    assert live.complete(finished) == len(finished.points) - 1
    assert TrackedRun(uri, finished.run, "adapters").complete(finished) == 0
    (run,) = found(uri)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"r": "8", "lora_alpha": "16", "target_modules": "q_proj, v_proj"}
    assert run.data.tags["mlora.uid"] == finished.run.uid
    wanted = by_curve(finished.points)
    assert curves(uri, run.info.run_id, wanted) == wanted

    anew = replace(finished.run, uid="another")
    TrackedRun(uri, anew, "adapters").failed()
    assert sorted(run.info.status for run in found(uri)) == ["FAILED", "FINISHED"]


def test_more_points_than_a_request_may_have_all_arrive(tmp_path: Path, finished: Finished) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    points = tuple(Point("train/loss", step, 1 / step) for step in range(1, 2502))
    assert TrackedRun(uri, finished.run, "adapters").complete(replace(finished, points=points)) == 2501
    (run,) = found(uri)
    assert curves(uri, run.info.run_id, ["train/loss"]) == by_curve(points)


def test_a_refusal_says_which_server(tmp_path: Path, finished: Finished) -> None:
    with pytest.raises(ReportError, match=r"mlflow: file:.* refuses the report"):
        TrackedRun((tmp_path / "runs").as_uri(), finished.run, "adapters")  # MLflow 3 keeps no runs in files
