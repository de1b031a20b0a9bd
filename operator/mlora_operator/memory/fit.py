"""What microbatches take of a stage's memory, learned from samples: non-negative least squares. Pure.

Three quantities of a microbatch are learned, each for itself: what it *keeps* between its forward and its backward, and the
most that is there during its *forward* and its *backward*. Each is

    bytes = exact + b0 + b1 T + b2 S + b3 N + b4 C + b5 X + r0 R0 + r1 R1 + r2 R2 + e E          b, r, e >= 0

``T`` tokens, ``S`` squared row lengths (paper: ``b0 + b1 B L + b2 B L^2``), ``N`` supervised positions and ``C`` those of
the largest chunk of logits; N and C are 0 but on the last stage. What the adapters themselves add is known exactly and is
taken off before the fit; ``X`` is a part of it that may be there at a peak or not (``mlora_worker.stream.footprint``). On
stage 0 nothing is kept below the first adapted module: ``R0`` is T where the first input group of a layer is
adapted, ``R1`` where one of the first two is, ``R2`` one of the first three. ``E`` is the most rows of one routed expert
that are worked on at a time, which turns on what the router chooses. Three quantities and not one, since a peak is a
maximum of lines, and that is no line.

The fit:

1. The newest ``WINDOW`` samples count, so that what has changed is forgotten.
2. Errors are relative, so that a narrow microbatch says as much as a wide one.
3. A sample far away counts in proportion to its distance (Huber's weights), so that one wrong sample moves nothing.
4. The prior counts with a very small weight: it decides only what the samples leave open. With rows of one length T and S
   are the same, and the prior says which is which.
5. A forward below its backward is no peak: where enough others are left, the forward is learned from those.
6. With fewer than ``FEWEST`` samples, or of one width only, the prior stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from mlora_worker.protocol import MemorySample
from mlora_worker.stream.footprint import Shape

WINDOW = 64
FEWEST = 4
_WIDTHS = 1.25  # the widest sample must be so many times as wide as the narrowest
_PRIOR_WEIGHT = 1e-7
_HIGHER = 0.98
_FLOOR = 1.05  # a peak that is not so much above what is known exactly says nothing
_ROUNDS = 12  # of reweighting
_HUBER = 1.5  # robust standard deviations from which on a sample counts less
_FAR = 6.0  # and from which on it is taken for an error
_MANY = 0.1  # part of the samples; more than this far away are not errors
_LEAST_SPREAD = 1e-4  # relative; rounding of the samples, blocks of the kernels
_DEVIATIONS = 3.0  # of the interval
LEAST_INTERVAL = 0.01  # relative, of any fit
PRIOR_INTERVAL = 0.1  # relative, of a prior that nothing was measured for

Array = np.ndarray[Any, np.dtype[np.float64]]


NONE_BELOW = 3  # of a stage whose input needs a gradient anyway: R0 to R2 are 0, T has it all


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Bytes per unit of each term: constant, tokens, squared tokens, supervised positions, those of the largest chunk,
    the layer's exact bytes, tokens that are adapted so early in a layer, and rows of an expert."""

    b0: float = 0.0
    b1: float = 0.0
    b2: float = 0.0
    b3: float = 0.0
    b4: float = 0.0
    b5: float = 0.0
    r0: float = 0.0
    r1: float = 0.0
    r2: float = 0.0
    e0: float = 0.0

    @property
    def values(self) -> tuple[float, ...]:
        """In the order in which statuses have them: what is new comes last."""
        return self.b0, self.b1, self.b2, self.b3, self.b4, self.b5, self.r0, self.r1, self.r2, self.e0

    def of(self, shape: Shape) -> float:
        """Without what is exact."""
        tokens, lowest = shape.tokens, shape.lowest_group
        early = (
            (self.r0 if lowest <= 0 else 0.0)
            + (self.r1 if lowest <= 1 else 0.0)
            + (self.r2 if lowest <= 2 else 0.0)
        )
        return (
            self.b0
            + (self.b1 + early) * tokens
            + self.b2 * shape.squared_tokens
            + self.b3 * shape.supervised
            + self.b4 * shape.loss_rows
            + self.b5 * shape.layer_bytes
            + self.e0 * shape.expert_rows
        )


@dataclass(frozen=True, slots=True)
class FittedLine:
    """One quantity. ``interval``: by how much more than predicted it may be, relative, within what was sampled."""

    coefficients: Coefficients
    interval: float = PRIOR_INTERVAL


@dataclass(frozen=True, slots=True)
class StageFit:
    """Of one stage. ``widest``: tokens of the widest sample; 0: nothing was measured, this is a prior. ``correction``: a
    factor on what is predicted, above 1 once memory ran out where it should not have.
    """

    kept: FittedLine = field(default_factory=lambda: FittedLine(Coefficients()))
    forward: FittedLine = field(default_factory=lambda: FittedLine(Coefficients()))
    backward: FittedLine = field(default_factory=lambda: FittedLine(Coefficients()))
    samples: int = 0
    widest: int = 0
    correction: float = 1.0

    def kept_bytes(self, shape: Shape) -> float:
        """At most, as far as the interval goes."""
        return self._upper(self.kept, shape, shape.exact_bytes)

    def peak_bytes(self, shape: Shape) -> float:
        """The same, of forward and backward."""
        exact = _exact_of_peak(shape)
        upper = max(self._upper(self.forward, shape, exact), self._upper(self.backward, shape, exact))
        return max(upper, shape.floor_bytes * (1 + LEAST_INTERVAL))

    def expected_peak(self, shape: Shape) -> float:
        """Without the interval."""
        learned = max(self.forward.coefficients.of(shape), self.backward.coefficients.of(shape))
        return max(_exact_of_peak(shape) + learned, shape.floor_bytes)

    def _upper(self, line: FittedLine, shape: Shape, exact: float) -> float:
        """The interval grows with each doubling of the width beyond what was sampled."""
        return (exact + line.coefficients.of(shape)) * self.interval_factor(line, shape.tokens)

    def interval_factor(self, line: FittedLine, tokens: float) -> float:
        """On what is predicted of a microbatch so wide."""
        beyond = max(0.0, math.log2(tokens / self.widest)) if self.widest and tokens else 0.0
        return 1 + line.interval * (1 + beyond)


@lru_cache(maxsize=256)
def fit_stage(samples: tuple[MemorySample, ...], prior: StageFit) -> StageFit:
    """The fit of one stage's samples, oldest first. ``prior``: of the model's shape, or an earlier fit."""
    usable = [one for one in samples if one.tokens and one.peak_bytes > _FLOOR * one.floor_bytes][-WINDOW:]
    widths = [one.tokens for one in usable]
    if len(usable) < FEWEST or max(widths) < _WIDTHS * min(widths):
        return prior
    shapes = [shape_of(one) for one in usable]
    peaks = [_exact_of_peak(shape) for shape in shapes]
    higher = [i for i, one in enumerate(usable) if one.forward_bytes >= _HIGHER * one.backward_bytes]
    forward = higher if len(higher) >= FEWEST else range(len(usable))
    return StageFit(
        kept=_fit(shapes, [s.exact_bytes for s in shapes], [one.kept_bytes for one in usable], prior.kept),
        forward=_fit(
            [shapes[i] for i in forward],
            [peaks[i] for i in forward],
            [usable[i].forward_bytes for i in forward],
            prior.forward,
        ),
        backward=_fit(shapes, peaks, [one.backward_bytes for one in usable], prior.backward),
        samples=len(usable),
        widest=max(widths),
        correction=prior.correction,
    )


def shape_of(sample: MemorySample) -> Shape:
    return Shape(
        tokens=sample.tokens,
        squared_tokens=sample.squared_tokens,
        supervised=sample.supervised,
        loss_rows=sample.loss_rows,
        exact_bytes=sample.exact_bytes,
        layer_bytes=sample.layer_bytes,
        floor_bytes=sample.floor_bytes,
        lowest_group=sample.lowest_group if sample.stage == 0 else NONE_BELOW,
        expert_rows=sample.expert_rows or 0,
    )


def _terms(shape: Shape) -> tuple[float, ...]:
    early = (shape.tokens if shape.lowest_group <= group else 0.0 for group in range(NONE_BELOW))
    return (
        1.0,
        shape.tokens,
        shape.squared_tokens,
        shape.supervised,
        shape.loss_rows,
        shape.layer_bytes,
        *early,
        shape.expert_rows,
    )


def _exact_of_peak(shape: Shape) -> float:
    """What is there of the exact bytes at any peak; what more there is, ``b5`` says."""
    return max(0.0, shape.exact_bytes - shape.layer_bytes)


def _fit(
    shapes: Sequence[Shape], exact: Sequence[float], measured: Sequence[int], prior: FittedLine
) -> FittedLine:
    """Rows are divided by about what was measured, columns by their mean, so that all numbers are near 1."""
    whole = np.array(measured, dtype=np.float64)
    tokens = np.array([shape.tokens for shape in shapes], dtype=np.float64)
    # One that says far too little must not weigh the more for it.
    sizes = np.maximum(whole, tokens * max(1.0, float(np.median(whole / tokens))))
    target = np.maximum(whole - np.array(exact, dtype=np.float64), 0.0) / sizes
    rows = np.array([_terms(shape) for shape in shapes], dtype=np.float64) / sizes[:, None]
    scale = np.where(rows.mean(axis=0) > 0, rows.mean(axis=0), 1.0)
    rows = rows / scale
    anchors = np.sqrt(_PRIOR_WEIGHT * len(shapes)) * np.eye(len(scale))
    wished = anchors @ (np.array(prior.coefficients.values) * scale)
    found, weights = np.zeros(len(scale)), np.ones(len(shapes))
    for _ in range(_ROUNDS):
        found = _nnls(
            np.vstack([rows * weights[:, None], anchors]), np.concatenate([target * weights, wished])
        )
        residuals = target - rows @ found
        weights, former = np.sqrt(_huber(residuals, _spread(residuals))), weights
        if np.allclose(weights, former, atol=1e-3):
            break
    residuals = target - rows @ found
    coefficients = Coefficients(*(float(one) for one in found / scale))
    return FittedLine(coefficients, _interval(residuals))


def _nnls(matrix: Array, wanted: Array) -> Array:
    # Here, since it is most of what a command takes to start, and only a fit needs it.
    from scipy.optimize import nnls

    solution, _ = nnls(matrix, wanted)
    return np.asarray(solution, dtype=np.float64)


def _spread(residuals: Array) -> float:
    """Robust standard deviation about 0."""
    return max(_LEAST_SPREAD, 1.4826 * float(np.median(np.abs(residuals))))


def _huber(residuals: Array, spread: float) -> Array:
    return np.minimum(1.0, _HUBER * spread / np.maximum(np.abs(residuals), 1e-12))


def _interval(residuals: Array) -> float:
    """Relative: no less than ``_DEVIATIONS`` of the usual error, nor than the largest under-prediction that is no error of
    the measurement."""
    spread = _spread(residuals)
    far = np.abs(residuals) > _FAR * spread
    believed = residuals if far.mean() > _MANY else residuals[~far]
    return max(
        LEAST_INTERVAL, _DEVIATIONS * spread, float(believed.max(initial=0.0)) * (1 + 1 / len(residuals))
    )
