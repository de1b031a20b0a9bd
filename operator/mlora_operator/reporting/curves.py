"""What is reported of a task, and to whom. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

LOSS = "train/loss"
# Field of a line of history.jsonl to the name of its curve. Tokens of an evaluation are the same each time.
_TRAINING = {
    "loss": LOSS,
    "learningRate": "train/learning_rate",
    "gradNorm": "train/grad_norm",
    "tokens": "train/tokens",
}
_PREFERENCES = {
    "chosenReward": "rewards/chosen",
    "rejectedReward": "rewards/rejected",
    "margin": "rewards/margins",
    "accuracy": "rewards/accuracies",
    "chosenLogps": "logps/chosen",
    "rejectedLogps": "logps/rejected",
    "kl": "kl",
}
_TRAINING |= {name: f"train/{curve}" for name, curve in _PREFERENCES.items()}
_EVALUATION = {
    "evaluationLoss": "eval/loss",
    "perplexity": "eval/perplexity",
    "tokenAccuracy": "eval/token_accuracy",
} | {name: f"eval/{curve}" for name, curve in _PREFERENCES.items()}


class ReportError(Exception):
    """A reporter's library, or what it writes to, refuses. The message says what to do."""


class LibraryMissing(ReportError):
    """The library of a reporter is not installed."""


@dataclass(frozen=True, slots=True)
class Point:
    curve: str
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Run:
    """A task. Runs are told apart by ``uid``: a task that was deleted and made anew is another one."""

    uid: str
    namespace: str
    name: str
    base_model: str

    @property
    def title(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Finished:
    """All points of a task in the order of steps, and the settings that its adapter names."""

    run: Run
    points: tuple[Point, ...]
    settings: Mapping[str, str | int | float] = field(default_factory=dict)


class Reporter(Protocol):
    """Where one run goes. Whatever is called, and however often: a curve has one point at a step. All raise ReportError."""

    def add(self, points: Sequence[Point]) -> None:
        """While the task trains: a few points of many, rounded, in the order of steps."""

    def complete(self, finished: Finished) -> int:
        """All there is. Returns how many points were not there yet."""

    def failed(self) -> None:
        """The task has failed: nothing more will come."""

    def place(self) -> str:
        """Where people look."""


def points_of(history: bytes) -> tuple[Point, ...]:
    """Of ``history.jsonl``, in its order, which is that of steps. Raises ValueError for what is none."""
    found: list[Point] = []
    for number, line in enumerate(history.decode().splitlines(), start=1):
        try:
            fields = json.loads(line)
            step = int(fields["step"])
            names = _EVALUATION if "evaluationLoss" in fields else _TRAINING
            found += [
                Point(curve, step, float(fields[name]))
                for name, curve in names.items()
                if fields.get(name) is not None
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number} of the history is invalid: {error!r}") from error
    return tuple(found)


def by_curve(points: Iterable[Point]) -> dict[str, dict[int, float]]:
    """Value by step, by curve. The last of several at one step holds."""
    curves: dict[str, dict[int, float]] = {}
    for point in points:
        curves.setdefault(point.curve, {})[point.step] = point.value
    return curves
