"""A task as a run of MLflow, on a tracking server or in a database."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from mlora_operator.reporting.curves import Finished, Point, ReportError, Run, by_curve

_UID = "mlora.uid"
_MOST = 1000  # metrics of one request, by MLflow's REST interface


class TrackedRun:
    """The run with the tag ``mlora.uid``, which is made when there is none. What it has at a step stays."""

    def __init__(self, uri: str, run: Run, experiment: str) -> None:
        """Raises ReportError."""
        self._uri, self._run, self._experiment = uri, run, experiment
        os.environ.setdefault(
            "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true"
        )  # the command has its own words there
        self._known: dict[str, set[int]] = {}  # steps by curve
        with self._explained():
            self._client: Any = MlflowClient(tracking_uri=uri)
            self._id = self._found_or_made()

    def add(self, points: Sequence[Point]) -> None:
        with self._explained():
            self._write(points)

    def complete(self, finished: Finished) -> int:
        with self._explained():
            written = self._write(finished.points)
            params = [Param(name, str(value)) for name, value in finished.settings.items()]
            self._client.log_batch(self._id, params=params)
            if self._client.get_run(self._id).info.status != "FINISHED":
                self._client.set_terminated(self._id, "FINISHED")
        return written

    def failed(self) -> None:
        with self._explained():
            self._client.set_terminated(self._id, "FAILED")

    def place(self) -> str:
        return f"{self._uri}, experiment {self._experiment}, run {self._id}"

    def _found_or_made(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            found.experiment_id if found is not None else self._client.create_experiment(self._experiment)
        )
        quoted = self._run.uid.replace("'", "")
        runs = self._client.search_runs([experiment], f"tags.`{_UID}` = '{quoted}'", max_results=1)
        if runs:
            return str(runs[0].info.run_id)
        tags = {
            _UID: quoted,
            "mlora.namespace": self._run.namespace,
            "mlora.name": self._run.name,
            "mlora.baseModel": self._run.base_model,
        }
        return str(self._client.create_run(experiment, run_name=self._run.title, tags=tags).info.run_id)

    def _write(self, points: Sequence[Point]) -> int:
        now = int(time.time() * 1000)
        fresh: list[Any] = []
        for curve, values in by_curve(points).items():
            if curve not in self._known:
                self._known[curve] = {one.step for one in self._client.get_metric_history(self._id, curve)}
            missing = values.keys() - self._known[curve]
            fresh += [Metric(curve, values[step], now, step) for step in sorted(missing)]
        fresh.sort(key=lambda metric: metric.step)
        for start in range(0, len(fresh), _MOST):
            self._client.log_batch(self._id, metrics=fresh[start : start + _MOST])
            for metric in fresh[start : start + _MOST]:
                self._known[metric.key].add(metric.step)
        return len(fresh)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except MlflowException as error:
            raise ReportError(f"mlflow: {self._uri} rejected the report: {error}") from error
