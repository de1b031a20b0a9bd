"""What a stage's computation hands on, and its one refusal."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


class OutOfOrder(RuntimeError):
    """The stream broke a rule that the engine relies on."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a forward hands on: ``hidden`` [tokens, size] to the next stage, or ``losses`` [segments] float64
    on the last, with ``rewards`` [segments, REWARDS] where there are pairs.

    A segment's loss is the sum over its supervised tokens, or over its pairs.
    """

    hidden: Tensor | None = None
    losses: Tensor | None = None
    rewards: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """``hidden`` [tokens, size] for the next stage, or on the last ``scores`` float64: [2] sum of losses, correct
    predictions; [2 + REWARDS] where rows come in pairs; [rows] log-probabilities where a reference is asked for."""

    hidden: Tensor | None = None
    scores: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Backwarded:
    """``gradient`` [tokens, size] of the stage's input, None on stage 0. ``squared_norms`` [segments]
    float64: of this stage's gradients of the whole step where the segment closes it, 0 elsewhere.
    """

    gradient: Tensor | None
    squared_norms: Tensor


@dataclass(frozen=True, slots=True)
class StageState:
    """One stage's part of a checkpoint: ``tensors`` float32 on the CPU, by the names that it has there."""

    updates: int  # that AdamW has made
    tensors: dict[str, Tensor]
