"""The issue rule: one step of a task in flight, groups take turns, joining and leaving never flush."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.stream.rule import IssueRule


def always(_: str) -> bool:
    return True


def two_rows(_: str) -> list[int]:
    return [5, 5]


def test_two_tasks_on_two_stages_alternate() -> None:
    rule = IssueRule(stages=2, budget=100)
    rule.join("a", 10)
    rule.join("b", 10)
    first, second = rule.next(two_rows, always), rule.next(two_rows, always)
    assert first is not None
    assert second is not None
    assert [part.task for part in (*first, *second)] == ["a", "b"]
    assert rule.next(two_rows, always) is None, "both have a step in flight"
    assert rule.returned(["a"]) == ("a",)
    third = rule.next(two_rows, always)
    assert third is not None
    assert [part.task for part in third] == ["a"]


def test_a_lone_task_is_split_over_the_stages() -> None:
    rule = IssueRule(stages=2, budget=100)
    rule.join("a", 10)
    assert rule.next(two_rows, always) is not None
    assert rule.next(two_rows, always) is not None
    assert rule.next(two_rows, always) is None
    assert rule.returned(["a"]) == ()
    assert rule.returned(["a"]) == ("a",)


def test_a_task_that_has_no_further_step_does_not_hold_its_group_back() -> None:
    rule = IssueRule(stages=1, budget=100)
    rule.join("a", 10)
    rule.join("b", 10)
    parts = rule.next(two_rows, lambda task: task == "b")
    assert parts is not None
    assert [part.task for part in parts] == ["b"]
    assert rule.is_idle("a")


def test_a_task_in_flight_may_not_leave() -> None:
    rule = IssueRule(stages=1, budget=100)
    rule.join("a", 10)
    rule.next(two_rows, always)
    with pytest.raises(ValueError, match="in flight"):
        rule.leave("a")


def test_the_plan_follows_who_is_in_the_stream() -> None:
    rule = IssueRule(stages=2, budget=100)
    assert rule.plan.groups == ()
    rule.join("a", 60, rows_per_step=6)
    alone = rule.plan
    rule.join("b", 60, rows_per_step=6)
    rule.join("c", 60, rows_per_step=6)
    assert [group.tasks for group in rule.plan.groups] == [("a", "c"), ("b",)]
    rule.leave("b")
    rule.leave("c")
    assert rule.plan == alone


def test_a_limit_narrows_the_microbatches_of_its_task_until_it_leaves() -> None:
    rule = IssueRule(stages=1, budget=100)
    rule.join("a", 40, rows_per_step=4)
    rule.limit("a", 20)
    rule.limit("a", 1000)
    assert rule.plan.groups[0].microbatches == 2
    parts = rule.next(lambda _: [10] * 4, always)
    assert parts is not None
    assert parts[0].lengths == (10, 10)
    assert rule.next(lambda _: [10] * 4, always) is not None
    rule.returned(["a", "a"])
    rule.leave("a")
    rule.join("a", 40, rows_per_step=4)
    assert rule.plan.groups[0].microbatches == 1


def test_a_step_alone_waits_until_the_pipeline_is_empty() -> None:
    rule = IssueRule(stages=2, budget=100)
    rule.join("a", 10)
    rule.join("b", 10)
    assert rule.next(two_rows, always) is not None
    assert rule.next_alone("b", two_rows) is None
    rule.returned(["a"])
    parts = rule.next_alone("b", two_rows)
    assert parts is not None
    assert parts[0].lengths == (5,), "alone in the pipeline, it is split over the stages"


@given(
    stages=st.integers(1, 4),
    sizes=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=5), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_no_group_idles_while_its_tasks_wait(stages: int, sizes: list[list[int]], order: Random) -> None:
    """Whenever nothing may enter, every task has a step in the pipeline or shares a group with one that has."""
    rule = IssueRule(stages, budget=40)
    rows = {f"t{index}": lengths for index, lengths in enumerate(sizes)}
    for task, lengths in rows.items():
        rule.join(task, sum(lengths), len(lengths))
    in_flight: list[list[str]] = []
    for _ in range(30):
        while (parts := rule.next(rows.__getitem__, always)) is not None:
            in_flight.append([part.task for part in parts])
        assert all(any(not rule.is_idle(task) for task in group.tasks) for group in rule.plan.groups), (
            "a whole group is idle"
        )
        rule.returned(in_flight.pop(order.randrange(len(in_flight))))


@given(
    stages=st.integers(1, 4),
    budget=st.integers(1, 40),
    lives=st.lists(
        st.tuples(
            st.integers(0, 20), st.integers(1, 5), st.lists(st.integers(1, 20), min_size=1, max_size=5)
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_every_task_does_all_its_steps_and_never_two_at_once(
    stages: int, budget: int, lives: list[tuple[int, int, list[int]]]
) -> None:
    """Tasks join at random times; microbatches come back in order; the stream always drains."""
    rule = IssueRule(stages, budget)
    steps_left = {f"t{index}": steps for index, (_, steps, _) in enumerate(lives)}
    rows = {f"t{index}": lengths for index, (_, _, lengths) in enumerate(lives)}
    in_flight: deque[list[str]] = deque()
    for clock in range(2000):
        for index, (joins_at, _, lengths) in enumerate(lives):
            if joins_at == clock:
                rule.join(f"t{index}", sum(lengths))
        parts = rule.next(rows.__getitem__, lambda task: steps_left[task] > 0)
        if parts is not None:
            in_flight.append([part.task for part in parts])
            continue
        if in_flight:
            for task in rule.returned(in_flight.popleft()):
                steps_left[task] -= 1
                assert steps_left[task] >= 0
                if not steps_left[task]:
                    rule.leave(task)
        elif clock > 20:
            break
    assert not any(steps_left.values())
    assert rule.tasks == ()
