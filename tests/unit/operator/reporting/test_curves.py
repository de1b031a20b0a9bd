"""Which curves a history has."""

from __future__ import annotations

import json

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


def test_each_figure_of_preferences_is_a_point_of_its_curve_in_training_and_in_evaluation() -> None:
    names = ("chosenReward", "rejectedReward", "margin", "accuracy", "chosenLogps", "rejectedLogps", "kl")
    pairs = dict(zip(names, (0.5, -0.5, 1.0, 0.75, -20.0, -30.0, 0.25), strict=True))
    curves = {
        "rewards/chosen": 0.5,
        "rewards/rejected": -0.5,
        "rewards/margins": 1.0,
        "rewards/accuracies": 0.75,
        "logps/chosen": -20.0,
        "logps/rejected": -30.0,
        "kl": 0.25,
    }
    for kind, loss in (("train", "loss"), ("eval", "evaluationLoss")):
        found = by_curve(points_of(json.dumps({"step": 1, loss: 0.6, **pairs}).encode()))
        assert found == {f"{kind}/loss": {1: 0.6}} | {
            f"{kind}/{name}": {1: at} for name, at in curves.items()
        }


def test_fields_of_a_newer_history_are_left_out() -> None:
    assert by_curve(points_of(b'{"step": 1, "loss": 2.0, "mood": "good"}\n')) == {"train/loss": {1: 2.0}}


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b'{"loss": 1.0}', b'{"step": "x"}', b'{"step": 1, "loss": "low"}', b"7", b'{"step": null}']
)  # fmt: skip
def test_a_line_that_is_none_is_named(line: bytes) -> None:
    with pytest.raises(ValueError, match="line 2 of the history"):
        points_of(b'{"step": 1, "loss": 2.0}\n' + line + b"\n")
