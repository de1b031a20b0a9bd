"""How sides are compared and timed."""

from __future__ import annotations

import gc

import pytest

from bench.sides import Disagreement, check_losses, in_turns, median_rate, median_ratio, seconds

TIMES = [{"a": 4.0, "b": 2.0}, {"a": 9.0, "b": 3.0}, {"a": 10.0, "b": 1.0}]


def test_a_ratio_is_the_median_of_each_repetitions_own_ratio() -> None:
    assert median_ratio(TIMES, "a", "b") == 3.0
    assert median_rate(TIMES, "b", [20, 30, 40]) == 10.0


@pytest.mark.parametrize(
    ("losses", "agree"),
    [
        ({"a": [1.0, 2.0], "b": [1.0005, 2.0]}, True),
        ({"a": [1.0, 2.0], "b": [1.0, 2.01]}, False),
        ({"a": [1.0], "b": [1.0], "c": [0.9]}, False),
        ({"a": [1.0], "b": [float("nan")]}, False),
    ],
)
def test_losses_that_differ_void_the_comparison(losses: dict[str, list[float]], agree: bool) -> None:
    if agree:
        assert check_losses(losses, 1e-3) == pytest.approx(5e-4, rel=0.01)
    else:
        with pytest.raises(Disagreement, match="two different computations"):
            check_losses(losses, 1e-3)


def test_a_side_that_leaves_a_task_out_is_noticed() -> None:
    with pytest.raises(ValueError):
        check_losses({"a": [1.0, 2.0], "b": [1.0]}, 1e-3)


def test_every_other_repetition_goes_backwards() -> None:
    assert [in_turns("abc", repetition) for repetition in range(3)] == [list("abc"), list("cba"), list("abc")]


def test_pythons_collector_rests_while_the_clock_runs_and_only_then() -> None:
    during: list[bool] = []
    ticks = iter([10.0, 12.5])
    assert seconds(lambda: during.append(gc.isenabled()), clock=lambda: next(ticks)) == 2.5
    assert during == [False]
    assert gc.isenabled()
