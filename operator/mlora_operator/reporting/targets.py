"""``KIND:PLACE``: which reporter, and where it writes to."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlora_operator.reporting.curves import LibraryMissing, Reporter, Run

FORMS = "tensorboard:FOLDER, mlflow:URL or wandb:PROJECT"


@dataclass(frozen=True, slots=True)
class ReportTarget:
    kind: str
    place: str


def target(text: str) -> ReportTarget:
    """Raises ValueError, which says how it is written."""
    kind, _, place = text.partition(":")
    if kind not in _OPENERS or not place:
        raise ValueError(f"{text!r} is not a valid target: write {FORMS}")
    return ReportTarget(kind, place)


def check_installed(target: ReportTarget, find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raises LibraryMissing."""
    if find(target.kind) is None:
        raise LibraryMissing(
            f"{target.kind} is not installed: pip install 'mlora-operator[{target.kind}]', or leave --to "
            f"{target.kind} out"
        )


def open_reporter(target: ReportTarget, run: Run, environment: Mapping[str, str]) -> Reporter:
    """Raises LibraryMissing, ReportError."""
    check_installed(target)
    return _OPENERS[target.kind](target.place, run, environment)


def _tensorboard(place: str, run: Run, environment: Mapping[str, str]) -> Reporter:
    from mlora_operator.reporting.tensorboard import EventFiles

    del environment
    return EventFiles(place, run)


def _mlflow(place: str, run: Run, environment: Mapping[str, str]) -> Reporter:
    from mlora_operator.reporting.mlflow import TrackedRun

    return TrackedRun(place, run, environment.get("MLFLOW_EXPERIMENT_NAME") or "mlora")


def _wandb(place: str, run: Run, environment: Mapping[str, str]) -> Reporter:
    from mlora_operator.reporting.wandb import LoggedRun

    return LoggedRun(place, run, environment.get("WANDB_DIR") or ".")


# Kind, which is also the name of the library and of the extra that installs it.
_OPENERS: Mapping[str, Callable[[str, Run, Mapping[str, str]], Reporter]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
