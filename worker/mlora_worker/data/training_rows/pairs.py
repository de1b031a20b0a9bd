"""What an objective takes of a row of preferences: labels of its own, and how many tokens it counts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mlora_worker.data.training_rows.row_weights import weighted_sum
from mlora_worker.data.training_rows.token_rows import TokenRow
from mlora_worker.protocol import Objective


def prompt_labels(row: TokenRow) -> int:
    """Positions of the row, of a pair of the chosen one, that predict its prompt: all before the first that predicts its
    answer."""
    return int(np.argmax(row.labels[: row.split or None] >= 0))


def labels_for(row: TokenRow, objective: Objective | None) -> npt.NDArray[np.int32]:
    """[tokens] labels of a row, those of the chosen row's prompt among them where the objective learns prompts."""
    if objective is None or not objective.learns_prompts:
        return row.labels
    labels = row.labels.copy()
    prompt = prompt_labels(row)
    labels[:prompt] = row.ids[1 : prompt + 1]
    return labels


def likelihood_of(
    rows: Sequence[TokenRow], objective: Objective, weights: Sequence[float] | None
) -> tuple[float, float]:
    """Pairs or answers, each as it weighs; and what a chosen row's sum of cross entropies counts beside a pair's loss, so
    that the sum over all ``rows``, over the pairs, is the objective's weight times the mean over their tokens."""
    pairs = weighted_sum([1] * len(rows), weights)
    if not objective.likelihood:
        return pairs, 0.0
    tokens = weighted_sum([_tokens(row, objective) for row in rows], weights)
    return pairs, objective.likelihood * pairs / tokens if tokens else 0.0


def answer_tokens(row: TokenRow) -> int:
    """Of the chosen or desirable answer."""
    if row.desirable is not None:
        return int(np.count_nonzero(row.labels >= 0)) if row.desirable else 0
    return int(np.count_nonzero(row.labels[: row.split] >= 0))


def _tokens(row: TokenRow, objective: Objective) -> int:
    """Labels of the chosen row."""
    return int(np.count_nonzero(labels_for(row, objective)[: row.split] >= 0))
