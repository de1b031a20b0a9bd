"""Grouping of tasks and cutting of steps: every row once, balanced, within the budget."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.stream.grouping import Part, group_tasks, microbatches_wanted, split_step


@pytest.mark.parametrize(
    ("story", "tokens", "count", "expected"),
    [
        ("no task, no group", {}, 2, ()),
        ("no more groups than tasks", {"a": 5}, 2, (("a",),)),
        ("as many as tasks: each its own group", {"a": 5, "b": 9}, 2, (("b",), ("a",))),
        ("the third task joins the lighter group", {"a": 5, "b": 9, "c": 1}, 2, (("b",), ("a", "c"))),
        ("one group has all tasks", {"a": 5, "b": 9, "c": 1}, 1, (("a", "b", "c"),)),
        (
            "equal tasks are dealt in joining order",
            {"a": 4, "b": 4, "c": 4, "d": 4},
            2,
            (("a", "c"), ("b", "d")),
        ),
    ],
)
def test_tasks_are_dealt_by_falling_tokens(
    story: str, tokens: dict[str, int], count: int, expected: object
) -> None:
    assert group_tasks(tokens, count) == expected, story


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 4))
def test_the_largest_group_is_at_most_a_third_above_the_least_possible(sizes: list[int], count: int) -> None:
    tokens = {f"t{index}": size for index, size in enumerate(sizes)}
    groups = group_tasks(tokens, count)
    assert sorted(task for group in groups for task in group) == sorted(tokens)
    assert all(groups)
    largest = max(sum(tokens[task] for task in group) for group in groups)
    assert largest <= 4 / 3 * least_largest(sizes, count) + 1e-9


def least_largest(sizes: list[int], count: int) -> int:
    """By trying all ways to deal ``sizes`` to ``count`` groups."""
    best, loads = sum(sizes), [0] * count

    def deal(index: int) -> None:
        nonlocal best
        if max(loads) >= best:
            return
        if index == len(sizes):
            best = max(loads)
            return
        for group in range(count):
            loads[group] += sizes[index]
            deal(index + 1)
            loads[group] -= sizes[index]

    deal(0)
    return best


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("groups", range(2, 9))
def test_the_bubble_vanishes(stages: int, groups: int) -> None:
    assert (groups - 1) * microbatches_wanted(groups, stages) >= stages - 1


steps = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=1, max_size=5).map(
    lambda lists: [(f"t{index}", lengths) for index, lengths in enumerate(lists)]
)


@given(rows=steps, wanted=st.integers(1, 6), budget=st.integers(1, 200))
def test_every_row_travels_once_in_order_and_each_task_closes_once(
    rows: list[tuple[str, list[int]]], wanted: int, budget: int
) -> None:
    microbatches = split_step(rows, wanted, budget)
    assert microbatches == split_step(rows, wanted, budget)
    seen: dict[str, list[int]] = {task: [] for task, _ in rows}
    closed: list[str] = []
    for parts in microbatches:
        tokens = sum(sum(part.lengths) for part in parts)
        assert tokens <= budget or sum(len(part.lengths) for part in parts) == 1
        for part in parts:
            assert part.task not in closed
            assert part.first_row == len(seen[part.task])
            seen[part.task] += part.lengths
            if part.closes_step:
                closed.append(part.task)
    assert seen == dict(rows)
    assert closed == [task for task, _ in rows]
    assert len(microbatches) >= min(wanted, sum(len(lengths) for _, lengths in rows))


def widths(microbatches: tuple[tuple[Part, ...], ...]) -> list[int]:
    return [sum(sum(part.lengths) for part in parts) for parts in microbatches]


@pytest.mark.parametrize(
    ("story", "rows", "wanted", "budget", "expected"),
    [
        ("equal shares", [[10] * 4, [10] * 4], 2, 1000, [40, 40]),
        ("three of eight rows: as even as rows allow", [[10] * 8], 3, 1000, [30, 30, 20]),
        ("one long row sets the pace, the rest is even", [[100, 10, 10, 10, 10]], 3, 1000, [100, 20, 20]),
        ("the budget asks for more than are wanted", [[10] * 6], 1, 25, [20, 20, 20]),
        ("no more than there are rows", [[10, 10]], 5, 1000, [10, 10]),
        ("a row above the budget travels alone", [[5, 100, 5, 5]], 2, 20, [5, 100, 10]),
        ("no row, no microbatch", [[]], 2, 20, []),
    ],
)
def test_a_step_is_cut_evenly(
    story: str, rows: list[list[int]], wanted: int, budget: int, expected: list[int]
) -> None:
    named = [(f"t{index}", lengths) for index, lengths in enumerate(rows)]
    assert widths(split_step(named, wanted, budget)) == expected, story


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 5))
def test_the_widest_microbatch_is_as_narrow_as_any_cut_of_the_same_rows(rows: list[int], wanted: int) -> None:
    got = widths(split_step([("a", rows)], wanted, budget=10_000))
    assert len(got) == min(wanted, len(rows))
    every = (
        [sum(rows[start:end]) for start, end in zip((0, *cuts), (*cuts, len(rows)), strict=True)]
        for cuts in combinations(range(1, len(rows)), len(got) - 1)
    )
    assert max(got) == min(map(max, every))


@given(rows=steps, wanted=st.integers(1, 6), budget=st.integers(60, 200))
def test_the_budget_costs_no_more_microbatches_than_it_must(
    rows: list[tuple[str, list[int]]], wanted: int, budget: int
) -> None:
    flat = [length for _, lengths in rows for length in lengths]
    fewest, filled = 1, 0
    for length in flat:
        if filled + length > budget:
            fewest, filled = fewest + 1, 0
        filled += length
    assert len(split_step(rows, wanted, budget)) == max(fewest, min(wanted, len(flat)))
