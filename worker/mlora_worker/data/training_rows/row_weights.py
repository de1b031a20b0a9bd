"""Weights of rows within a step or an evaluation. Pure.

The loss of rows i with weights w_i, n_i supervised tokens and sums S_i of their tokens' losses is
``sum(w_i * S_i) / sum(w_i * n_i)``. It is the same when all w_i are multiplied by one number, so they are divided by the
largest: what travels is at most 1, whatever users write, and rows that all weigh the same are trained as without weights,
to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlora_worker.data.training_rows.token_rows import TokenRow


def relative_weights(rows: Sequence[TokenRow]) -> tuple[float, ...] | None:
    """Of each row, the largest 1; None when all weigh the same."""
    return relative([row.weight for row in rows])


def relative(weights: Sequence[float]) -> tuple[float, ...] | None:
    """As above, of the weights alone."""
    largest = max(weights, default=1.0)
    if all(weight == largest for weight in weights):
        return None
    return tuple(weight / largest for weight in weights)


def weighted_sum(counts: Sequence[int], weights: Sequence[float] | None) -> float:
    """Supervised tokens, each as its row weighs."""
    if weights is None:
        return float(sum(counts))
    return sum(count * weight for count, weight in zip(counts, weights, strict=True))
