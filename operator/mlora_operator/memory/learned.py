"""What is known of a pipeline's memory: from its status, from new samples, from where memory ran out. Pure.

A fit is kept in the pipeline's status, so that an operator or a group of workers that starts again goes on with it. What is
in the status changes only when it makes a difference: predictions that move by less than ``STEADY`` are left as they are,
so that a status is not written with every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from mlora_operator.api.pipeline_status import LearnedLine, LearnedMemory
from mlora_operator.memory.fit import Coefficients, FittedLine, StageFit, fit_stage
from mlora_operator.memory.model import MemoryModel
from mlora_worker.protocol import MemoryExhausted, MemorySample
from mlora_worker.stream.footprint import MOST_EXPERT_ROWS, Shape

STEADY = 0.01
MOST_CORRECTION = 4.0
_DIGITS = 9
_MOST = 1e18  # bytes for a token, or for anything else that is counted


def learn(
    model: MemoryModel,
    held: Iterable[LearnedMemory],
    samples: Iterable[MemorySample],
    exhausted: Iterable[MemoryExhausted] = (),
) -> Mapping[int, StageFit]:
    """The fits of all stages of which more is known than ``model``, which has none, can tell. ``samples``: oldest first."""
    known = fits_of(held)
    by_stage: dict[int, list[MemorySample]] = {}
    for sample in samples:
        by_stage.setdefault(sample.stage, []).append(sample)
    learned: dict[int, StageFit] = {}
    for report in model.stages:
        before = known.get(report.stage)
        if before is None and report.stage not in by_stage:
            continue
        start = before if before is not None else model.fit_of(report)
        fit = fit_stage(tuple(by_stage.get(report.stage, ())), start)
        if before is not None and is_steady(before, fit, model.microbatch_tokens):
            fit = before
        if fit.samples or before is not None:
            learned[report.stage] = fit
    for one in exhausted:
        # Workers tell of it as long as they run. Of fewer tasks than were there it says nothing.
        if one.stage < len(model.stages) and model.demands.keys() >= set(one.tasks):
            fit = replace(model, learned=learned).corrected(one.stage, one.tasks)
            learned[one.stage] = replace(fit, correction=min(fit.correction, MOST_CORRECTION))
    return learned


def is_steady(before: StageFit, after: StageFit, microbatch_tokens: int) -> bool:
    """They predict the same for a wide and for a narrow microbatch, and are about as sure of it."""
    if before.samples == 0 or before.correction != after.correction or after.widest > 2 * before.widest:
        return False
    for tokens in (microbatch_tokens, microbatch_tokens / 16):
        rows = min(tokens, MOST_EXPERT_ROWS)
        shape = Shape(tokens, tokens * tokens / 4, supervised=tokens, loss_rows=tokens, expert_rows=rows)
        for old, new in (
            (before.kept_bytes(shape), after.kept_bytes(shape)),
            (before.peak_bytes(shape), after.peak_bytes(shape)),
        ):
            if abs(new - old) > STEADY * old:
                return False
    return True


def to_status(
    learned: Mapping[int, StageFit], origin: str, image: str | None = None
) -> tuple[LearnedMemory, ...]:
    """``origin``: of what it was learned (``origin.py``); ``image``: of the workers that measured it."""
    return tuple(
        LearnedMemory(
            stage=stage,
            origin=origin,
            image=image,
            samples=fit.samples,
            widest=fit.widest,
            correction=_text(fit.correction),
            kept=_line(fit.kept),
            forward=_line(fit.forward),
            backward=_line(fit.backward),
        )
        for stage, fit in sorted(learned.items())
    )


def fits_of(held: Iterable[LearnedMemory]) -> dict[int, StageFit]:
    """By stage. What cannot be read, since somebody wrote it by hand, is left out."""
    return {one.stage: fit for one in held if (fit := _readable(one)) is not None}


def from_status(one: LearnedMemory) -> StageFit:
    """Raises ValueError for text that is no number, or none that a fit may have; TypeError for too many of them."""
    if one.samples < 0 or one.widest < 0:
        raise ValueError("the number of samples must not be negative")
    return StageFit(
        kept=_read(one.kept),
        forward=_read(one.forward),
        backward=_read(one.backward),
        samples=one.samples,
        widest=one.widest,
        correction=_number(one.correction, least=1.0),
    )


def _readable(one: LearnedMemory) -> StageFit | None:
    try:
        return from_status(one)
    except (ValueError, TypeError):
        return None


def _line(line: FittedLine) -> LearnedLine:
    return LearnedLine(
        coefficients=tuple(map(_text, line.coefficients.values)), interval=_text(line.interval)
    )


def _read(line: LearnedLine) -> FittedLine:
    return FittedLine(Coefficients(*map(_number, line.coefficients)), _number(line.interval, least=0.0))


def _number(text: str, least: float = -math.inf) -> float:
    number = float(text)
    if not least <= number <= _MOST or number < -_MOST:  # nor NaN
        raise ValueError(f"{text} is not a learned number")
    return number


def _text(number: float) -> str:
    return f"{number:.{_DIGITS}g}"
