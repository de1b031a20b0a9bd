"""A task's losses, step by step, as the file that is published beside its adapter. Pure.

One JSON object a line: ``{"step", "loss", "learningRate", "gradNorm", "tokens"}`` for a training step (no loss: it had no
supervised token), ``{"step", "evaluationLoss", "perplexity", "tokenAccuracy", "tokens"}`` for an evaluation after it.
Rows that are pairs have ``{"chosenReward", "rejectedReward", "margin", "accuracy", "chosenLogps", "rejectedLogps"}`` in
each, and no perplexity.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlora_worker.protocol import EvaluationRecord, PreferenceRecord, StepRecord
from mlora_worker.storage.artifacts.model_card import perplexity
from mlora_worker.storage.versioned_json import plain_json

_LONGEST_LINE, _MOST_LINES = 1024, 100_000  # characters of one that is read; lines
MOST_STEPS = 20_000  # training steps that have a line; of more, each second one, each fourth, ...


class History:
    """``lines``: what a former run has written, of steps up to ``until``. Raises ValueError for what none has."""

    def __init__(self, lines: bytes = b"", most: int = MOST_STEPS, until: int | None = None) -> None:
        self._most = most
        self._stride = 1
        self._steps: dict[int, str] = {}  # step -> its line
        self._evaluations: dict[int, str] = {}
        written = lines.decode().splitlines()
        if len(written) > _MOST_LINES:
            raise ValueError(f"there are {len(written)} lines, more than {_MOST_LINES}")
        for line in written:
            step, evaluated = _read(line, until)
            (self._evaluations if evaluated else self._steps)[step] = line
        self._steps, self._stride = _thinned(self._steps, self._most, _stride_of(self._steps, self._most))
        self._evaluations, _ = _thinned(self._evaluations, self._most, 1)

    def add_step(self, record: StepRecord) -> None:
        if record.step % self._stride and record.step != 1:
            return
        self._steps[record.step] = _line(
            step=record.step,
            loss=record.loss,
            learningRate=record.learning_rate,
            gradNorm=record.grad_norm,
            tokens=record.tokens,
            **_preference(record.preference),
        )
        self._steps, self._stride = _thinned(self._steps, self._most, self._stride)

    def add_evaluation(self, record: EvaluationRecord) -> None:
        self._evaluations[record.step] = _line(
            step=record.step,
            evaluationLoss=record.loss,
            perplexity=perplexity(record.loss) if record.preference is None else None,
            tokenAccuracy=record.token_accuracy,
            tokens=record.tokens,
            **_preference(record.preference),
        )
        self._evaluations, _ = _thinned(self._evaluations, self._most, 1)

    def lines(self, until: int | None = None) -> bytes:
        """In the order of the steps, an evaluation behind its step; up to step ``until``."""
        both = [(step, 0, line) for step, line in self._steps.items()]
        both += [(step, 1, line) for step, line in self._evaluations.items()]
        return "".join(
            f"{line}\n" for step, _, line in sorted(both) if until is None or step <= until
        ).encode()


def _thinned(lines: dict[int, str], most: int, stride: int) -> tuple[dict[int, str], int]:
    """At most ``most`` lines: each second step of those that are left, as often as needed."""
    while len(lines) > most:
        stride *= 2
        lines = {step: line for step, line in lines.items() if step % stride == 0 or step == 1}
    return lines, stride


def _stride_of(lines: Mapping[int, str], most: int) -> int:
    """What a former run had thinned the steps to: the power of two of which all but the first are multiples."""
    if len(lines) <= most // 2:  # never thinned
        return 1
    return min((step & -step for step in lines if step > 1), default=1)


def _read(line: str, until: int | None) -> tuple[int, bool]:
    """Step of a line, and whether it is an evaluation's. Raises ValueError."""
    if len(line) > _LONGEST_LINE:
        raise ValueError(f"a line has {len(line)} characters")
    found = plain_json(line.encode())
    if not isinstance(found, dict) or any(type(value) not in (int, float) for value in found.values()):
        raise ValueError(f"{line[:100]} is not a line of losses")
    step = found.get("step")
    if not isinstance(step, int) or step < 0 or (until is not None and step > until):
        raise ValueError(f"{line[:100]} does not belong to a step up to {until}")
    return step, "evaluationLoss" in found


def _preference(record: PreferenceRecord | None) -> Mapping[str, float]:
    found: Mapping[str, float] = {} if record is None else record.model_dump(by_alias=True)
    return found


def _line(**facts: Any) -> str:
    known: Mapping[str, Any] = {name: fact for name, fact in facts.items() if fact is not None}
    return json.dumps(known, allow_nan=False)
