"""How far an adapter has come from its reference, as ``kto`` estimates it before each of its steps and evaluations.

Each prompt is followed by the answer of the row before it, the first one by that of the last row. The estimate is the mean
over these mismatched rows of their answers' log-probability under the adapter, less that under the frozen base; at least 0.
It is a number, so it has no gradient. Its rows are those of the task's whole step, or of the whole evaluation: no neighbour
and no cut into microbatches decides which these are. They go through the stream forward only, without dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, overload

import numpy as np
from torch import Tensor

from mlora_worker.bounds import is_within
from mlora_worker.data.training_rows.pairs import prompt_labels
from mlora_worker.data.training_rows.token_rows import IGNORED, TokenRow

Side = Literal["adapter", "base"]


class MismatchedRows(Sequence[TokenRow]):
    """Made when they are asked for. What is longer than ``longest`` is cut at its end."""

    def __init__(self, rows: Sequence[TokenRow], longest: int) -> None:
        self._rows, self._longest = rows, longest
        starts = [_answer_of(row) for row in rows]
        answers = [len(row.ids) - start for row, start in zip(rows, starts, strict=True)]
        former = [*answers[-1:], *answers[:-1]]
        self.lengths = [min(longest, start + answer) for start, answer in zip(starts, former, strict=True)]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> TokenRow: ...
    @overload
    def __getitem__(self, place: slice) -> list[TokenRow]: ...
    def __getitem__(self, place: int | slice) -> TokenRow | list[TokenRow]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        row, former = self._rows[place], self._rows[place - 1]
        start = _answer_of(row)
        ids = np.concatenate([row.ids[:start], former.ids[_answer_of(former) :]])[: self._longest]
        labels = np.full(len(ids), IGNORED, np.int32)
        labels[start - 1 : -1] = ids[start:]
        return TokenRow(ids, labels)


def _answer_of(row: TokenRow) -> int:
    """The first token of its answer."""
    return 1 + prompt_labels(row)


@dataclass(slots=True)
class DivergenceInFlight:
    """One estimate on its way."""

    of_evaluation: bool  # else it is that of a step
    rows: MismatchedRows
    left: list[tuple[Side, tuple[int, ...]]]  # microbatches that have not entered yet, the next one last
    sums: dict[Side, float] = field(default_factory=dict)  # of log-probabilities that are back
    outstanding: int = 0

    @property
    def complete(self) -> bool:
        return not self.left and not self.outstanding

    def add(self, side: Side, values: Tensor) -> None:
        """Of a microbatch that is back."""
        self.outstanding -= 1
        self.sums[side] = self.sums.get(side, 0.0) + float(values.sum())

    @property
    def kl(self) -> float | None:
        """None where it is no number."""
        found = (self.sums["adapter"] - self.sums["base"]) / len(self.rows)
        return max(0.0, found) if is_within(found) else None


def begun(
    rows: MismatchedRows,
    microbatches: Sequence[tuple[int, ...]],
    *,
    of_evaluation: bool = False,
    base: float | None = None,
) -> DivergenceInFlight:
    """``microbatches``: indices of the rows of each. ``base``: sum of the base's log-probabilities, where it is known."""
    sides: tuple[Side, ...] = ("adapter", "base") if base is None else ("adapter",)
    left = [(side, indices) for side in sides for indices in microbatches]
    found = DivergenceInFlight(of_evaluation, rows, left[::-1])
    if base is not None:
        found.sums["base"] = base
    return found
