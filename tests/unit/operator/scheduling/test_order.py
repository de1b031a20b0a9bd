"""First served first: priority, then age, then names."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.scheduling.order import Candidate, between_namespaces, in_order

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


@pytest.mark.parametrize(
    ("story", "given_", "reach", "expected"),
    [
        ("as they are, where nobody is bounded",
         [candidate("a", 0, 9, "x"), candidate("b", 5, 1, "y")], {"x": None, "y": None}, "ba"),
        ("a priority counts up to the reach",
         [candidate("a", 0, 9, "x"), candidate("b", 5, 1, "y")], {"x": 0, "y": 0}, "ab"),
        ("and no further",
         [candidate("a", 2, 9, "x"), candidate("b", 5, 1, "y")], {"x": None, "y": 3}, "ba"),
        ("a low priority stays low",
         [candidate("a", -1, 9, "x"), candidate("b", 0, 1, "y")], {"x": 0, "y": 0}, "ba"),
        ("within a namespace the higher goes first, in that one's turns",
         [candidate("a", 0, 9, "x"), candidate("b", 0, 5, "y"), candidate("c", 7, 1, "x")], {"x": 0, "y": 0}, "cba"),
        ("of one namespace nothing is bounded",
         [candidate("a", 0, 9, "x"), candidate("b", 5, 1, "x")], {"x": 0}, "ba"),
    ],
)  # fmt: skip
def test_between_namespaces(
    story: str, given_: list[Candidate], reach: dict[str, int | None], expected: str
) -> None:
    assert "".join(one.uid for one in between_namespaces(given_, reach.__getitem__)) == expected, story


@given(candidates, st.none() | st.integers(-3, 3))
def test_within_a_namespace_the_order_is_that_of_all(many: list[Candidate], reach: int | None) -> None:
    found = between_namespaces(many, lambda _: reach)
    assert sorted(one.uid for one in found) == sorted(one.uid for one in many)
    for namespace in {one.namespace for one in many}:
        own = [one for one in many if one.namespace == namespace]
        assert tuple(one for one in found if one.namespace == namespace) == in_order(own)
    if reach is None:
        assert found == in_order(many)
