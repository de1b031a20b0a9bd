"""Which curves a history has."""

from __future__ import annotations

import pytest

from mlora_operator.reporting.curves import Finished, by_curve, points_of


def test_each_figure_of_a_history_is_a_point_of_its_curve(finished: Finished) -> None:
    assert by_curve(finished.points) == {
        "train/loss": {1: 3.123456789, 3: 2.5},
        "train/learning_rate": {1: 1e-4, 2: 2e-4, 3: 3e-4},
        "train/grad_norm": {1: 2.5, 3: 1.5},
        "train/tokens": {1: 90, 2: 10, 3: 80},
        "eval/loss": {0: 3.5, 3: 2.25},
        "eval/perplexity": {0: 33.1, 3: 9.5},
        "eval/token_accuracy": {0: 0.25, 3: 0.5},
    }
    assert [point.step for point in finished.points] == sorted(point.step for point in finished.points)


def test_fields_of_a_newer_history_are_left_out() -> None:
    assert by_curve(points_of(b'{"step": 1, "loss": 2.0, "mood": "good"}\n')) == {"train/loss": {1: 2.0}}


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b'{"loss": 1.0}', b'{"step": "x"}', b'{"step": 1, "loss": "low"}', b"7", b'{"step": null}']
)  # fmt: skip
def test_a_line_that_is_none_is_named(line: bytes) -> None:
    with pytest.raises(ValueError, match="line 2 of the history"):
        points_of(b'{"step": 1, "loss": 2.0}\n' + line + b"\n")
