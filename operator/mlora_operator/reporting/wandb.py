"""A task as a run of Weights & Biases, sent or, with WANDB_MODE=offline, kept for ``wandb sync``."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.errors import Error

from mlora_operator.reporting.curves import Finished, Point, ReportError, Run


class LoggedRun:
    """The run whose id is the task's uid.

    Weights & Biases takes the steps of a run in order, and each once. So nothing is written while the task trains, and a
    run that is there goes on behind its last step. Offline nobody knows what was sent before: a folder of that run in
    ``folder``/wandb stays as it is; it appears there when it is whole.
    """

    def __init__(self, project: str, run: Run, folder: str) -> None:
        self._entity, _, self._project = project.rpartition("/")
        self._run = run
        self._id = re.sub(r"[^A-Za-z0-9_-]", "-", run.uid)[:64]
        self._folder = Path(folder) / "wandb"
        self._place = f"{project}, run {self._id}"

    def add(self, points: Sequence[Point]) -> None:
        pass

    def complete(self, finished: Finished) -> int:
        try:
            mode = wandb.setup().settings.mode
            if mode == "disabled":
                raise ReportError("wandb: it is disabled (WANDB_MODE=disabled), so nothing was reported")
            if mode in ("offline", "dryrun"):
                return self._offline(finished)
            return self._send(finished, None)
        except Error as error:
            raise ReportError(f"wandb: {self._project} rejected the report: {error}") from error
        except OSError as error:
            raise ReportError(f"wandb: cannot write {self._folder}: {error.strerror or error}") from error

    def failed(self) -> None:
        pass

    def place(self) -> str:
        return self._place

    def _offline(self, finished: Finished) -> int:
        there = sorted(self._folder.glob(f"offline-run-*-{self._id}"))
        written = 0
        if not there:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".mlora-", dir=self._folder) as unfinished:
                written = self._send(finished, unfinished)
                made = next(Path(unfinished).glob(f"wandb/offline-run-*-{self._id}"))
                there = [self._folder / made.name]
                shutil.move(made, there[0])
        self._place = f"wandb sync {there[0]}"
        return written

    def _send(self, finished: Finished, folder: str | None) -> int:
        run: Any = wandb.init(
            project=self._project,
            entity=self._entity or None,
            id=self._id,
            name=self._run.title,
            resume="allow",
            dir=folder,
            config={**finished.settings, "uid": self._run.uid},
            settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
        )
        with run:
            steps: dict[int, dict[str, float]] = {}
            for point in finished.points:
                steps.setdefault(point.step, {})[point.curve] = point.value
            fresh = {step: values for step, values in sorted(steps.items()) if step >= run.step}
            for step, values in fresh.items():
                run.log(values, step=step)
            if folder is None:
                self._place = run.url or self._place
        return sum(map(len, fresh.values()))
