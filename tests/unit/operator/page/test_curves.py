"""Losses are kept within bounds, and what is kept still tells the whole way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlora_operator.page.curves import COLOURS, CURVES, EVALUATIONS, POINTS, Curve, Curves, Drawn, thinned
from tests.fixtures.stories import stories


@settings(max_examples=stories(40), deadline=None)
@given(jumps=st.lists(st.integers(1, 400), min_size=1, max_size=3000))
def test_a_curve_keeps_its_first_and_its_newest_point_however_long_it_gets(jumps: list[int]) -> None:
    curve, step = Curve(0), 0
    for jump in jumps:
        step += jump
        curve.add(step, 1 / step)
    steps = list(curve.steps)
    assert len(steps) == len(curve.losses) <= POINTS
    assert steps[0] == jumps[0]
    assert steps[-1] == step
    assert steps == sorted(set(steps))


def test_a_long_curve_is_as_dense_at_its_beginning_as_at_its_end() -> None:
    curve = Curve(0)
    for step in range(1, 20_001):
        curve.add(step, 1.0)
    assert POINTS // 3 < len(curve.steps) <= POINTS
    gaps = [after - before for before, after in zip(curve.steps, curve.steps[1:], strict=False)]
    assert max(gaps) <= 4 * min(gaps[:-1])


def test_a_task_that_went_back_to_its_checkpoint_takes_the_steps_after_it_anew() -> None:
    curve = Curve(0)
    for step in range(1, 11):
        curve.add(step, 2.0)
    curve.add(6, 1.0)
    assert list(curve.steps) == [1, 2, 3, 4, 5, 6]
    assert list(curve.losses) == [2.0] * 5 + [1.0]


def test_evaluations_are_kept_once_each_and_only_the_newest() -> None:
    curves = Curves()
    for number in range(1, 200):
        curves.note("a", number, 1.0, (number, 0.5))
        curves.note("a", number, 1.0, (number, 0.5))
    drawn = curves.drawn("a")
    assert drawn is not None
    assert drawn.evaluations == tuple((number, 0.5) for number in range(200 - EVALUATIONS, 200))


def test_a_report_without_a_new_step_adds_no_point() -> None:
    curves = Curves()
    for _ in range(3):
        curves.note("a", 1, 2.0)
    curves.note("a", 2, None)  # a step without a supervised token
    curves.note("b", 0, None)  # has not begun
    drawn = curves.drawn("a")
    assert drawn is not None
    assert drawn.steps == (1,)
    assert curves.drawn("b") is None


def test_of_more_curves_than_are_kept_those_go_that_trained_longest_ago() -> None:
    curves = Curves()
    for number in range(CURVES):
        curves.note(f"{number}", 1, 1.0)
    curves.note("0", 2, 1.0)
    curves.note("new", 1, 1.0)
    assert len(curves.colours()) == CURVES
    assert curves.drawn("0") is not None
    assert curves.drawn("1") is None


def test_tasks_that_train_together_have_different_colours_and_keep_them() -> None:
    curves = Curves()
    for number in range(1000):  # tasks of before
        curves.note(f"old-{number}", 1, 1.0)
    together = [f"{number}" for number in range(COLOURS)]
    for uid in together:
        curves.note(uid, 1, 1.0)
    colours = [curves.colours()[uid] for uid in together]
    assert sorted(colours) == list(range(COLOURS))
    for uid in reversed(together):
        curves.note(uid, 2, 1.0)
    assert [curves.colours()[uid] for uid in together] == colours


@given(count=st.integers(1, 600), most=st.integers(2, 200))
def test_a_thinned_curve_has_both_ends(count: int, most: int) -> None:
    whole = Drawn(3, tuple(range(1, count + 1)), (0.5,) * count, ())
    few = thinned(whole, most)
    assert len(few.steps) == len(few.losses) == min(count, most)
    assert (few.steps[0], few.steps[-1]) == (1, count)
    assert len(set(few.steps)) == len(few.steps)
