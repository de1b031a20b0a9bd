"""Grouping of tasks and cutting of steps: every row once, balanced, within the budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.stream.grouping import group_tasks, microbatches_wanted, split_step


@pytest.mark.parametrize(
    ("story", "tokens", "stages", "expected"),
    [
        ("no task, no group", {}, 2, ()),
        ("one task on two stages is one group", {"a": 5}, 2, (("a",),)),
        ("as many tasks as stages: each its own group", {"a": 5, "b": 9}, 2, (("b",), ("a",))),
        ("the third task joins the lighter group", {"a": 5, "b": 9, "c": 1}, 2, (("b",), ("a", "c"))),
        ("one stage fuses all tasks", {"a": 5, "b": 9, "c": 1}, 1, (("a", "b", "c"),)),
        (
            "equal tasks are dealt in joining order",
            {"a": 4, "b": 4, "c": 4, "d": 4},
            2,
            (("a", "c"), ("b", "d")),
        ),
    ],
)
def test_tasks_are_dealt_by_falling_tokens(
    story: str, tokens: dict[str, int], stages: int, expected: object
) -> None:
    assert group_tasks(tokens, stages) == expected, story


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


def test_a_step_is_cut_into_equal_shares() -> None:
    microbatches = split_step([("a", [10] * 4), ("b", [10] * 4)], wanted=2, budget=1000)
    assert [sum(sum(part.lengths) for part in parts) for parts in microbatches] == [40, 40]
