"""First served first: priority, then age, then names."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.scheduling.order import Candidate, in_order

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def candidate(
    uid: str, priority: int = 0, age: int = 0, namespace: str = "team-a", name: str | None = None
) -> Candidate:
    return Candidate(uid, namespace, name or uid, priority, NOON - timedelta(seconds=age))


@pytest.mark.parametrize(
    ("story", "given_", "expected"),
    [
        ("higher priority goes first", [candidate("low", 1), candidate("high", 2)], ["high", "low"]),
        ("a negative priority goes last", [candidate("low", -1), candidate("default")], ["default", "low"]),
        (
            "priority beats age",
            [candidate("old", 0, age=99), candidate("new", 1, age=1)],
            ["new", "old"],
        ),
        (
            "of equal priority the older goes first",
            [candidate("new", age=1), candidate("old", age=2)],
            ["old", "new"],
        ),
        (
            "made in the same second: by namespace, then name",
            [candidate("c", namespace="b"), candidate("b", namespace="a"), candidate("a", namespace="a")],
            ["a", "b", "c"],
        ),
        (
            "the namespace before the name",
            [candidate("x", namespace="b", name="a"), candidate("y", namespace="a", name="b")],
            ["y", "x"],
        ),
        (
            "deleted and made again in the same second: by uid",
            [candidate("2", name="same"), candidate("1", name="same")],
            ["1", "2"],
        ),
    ],
)
def test_order(story: str, given_: list[Candidate], expected: list[str]) -> None:
    assert [one.uid for one in in_order(given_)] == expected, story


candidates = st.lists(
    st.builds(
        candidate,
        st.uuids().map(str),
        st.integers(-2, 2),
        st.integers(0, 3),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["x", "y"]),
    ),
    unique_by=lambda one: one.uid,
)


@given(candidates, st.randoms())
def test_the_order_does_not_depend_on_how_the_tasks_were_listed(
    many: list[Candidate], random: object
) -> None:
    shuffled = list(many)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert in_order(shuffled) == in_order(many)


@given(candidates)
def test_nobody_is_lost_and_priorities_never_rise(many: list[Candidate]) -> None:
    ordered = in_order(many)
    assert sorted(one.uid for one in ordered) == sorted(one.uid for one in many)
    priorities = [one.priority for one in ordered]
    assert priorities == sorted(priorities, reverse=True)
