"""Places in memory are given greedily, in order, and nobody overtakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.scheduling.admission import Outcome, Verdict, admit
from mlora_operator.scheduling.order import Candidate, in_order

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
Sizes = dict[str, int]


def candidate(uid: str, priority: int = 0, age: int = 0) -> Candidate:
    return Candidate(uid, "team-a", uid, priority, NOON - timedelta(seconds=age))


def memory(budget: int, sizes: Sizes) -> Callable[[Sequence[str]], Verdict]:
    """A pipeline in which each task takes a fixed number of bytes."""

    def fits(uids: Sequence[str]) -> Verdict:
        needed = sum(sizes[uid] for uid in uids)
        return Verdict(needed <= budget, 0, needed, budget)

    return fits


A, W, N = Outcome.ADMITTED, Outcome.WAITING, Outcome.NEVER_FITS


@pytest.mark.parametrize(
    ("story", "budget", "running", "waiting", "expected"),
    [
        ("all fit", 10, {}, {"a": 4, "b": 6}, {"a": A, "b": A}),
        ("the first that does not fit waits", 10, {}, {"a": 6, "b": 5}, {"a": A, "b": W}),
        ("nobody overtakes one that waits", 10, {}, {"a": 6, "b": 5, "c": 1}, {"a": A, "b": W, "c": W}),
        (
            "one that never fits is told so and stands in nobody's way",
            10,
            {},
            {"a": 11, "b": 10},
            {"a": N, "b": A},
        ),
        (
            "never fitting is told even behind one that waits",
            10,
            {"r": 9},
            {"a": 5, "b": 11},
            {"r": A, "a": W, "b": N},
        ),
        ("what runs keeps its place", 10, {"r": 8}, {"a": 5}, {"r": A, "a": W}),
        ("what runs keeps its place though it fits no more", 10, {"r": 12}, {"a": 1}, {"r": A, "a": W}),
        ("nothing to do", 10, {}, {}, {}),
    ],
)
def test_admission(
    story: str, budget: int, running: Sizes, waiting: Sizes, expected: dict[str, Outcome]
) -> None:
    fits = memory(budget, {**running, **waiting})
    places = admit([candidate(uid) for uid in waiting], [candidate(uid) for uid in running], fits)
    assert {uid: place.outcome for uid, place in places.items()} == expected, story


def test_a_higher_priority_gets_the_place_first() -> None:
    fits = memory(10, {"old": 8, "urgent": 8})
    places = admit([candidate("old", age=100), candidate("urgent", priority=1)], [], fits)
    assert places["urgent"].outcome is A
    assert places["old"].outcome is W


def test_one_that_waits_is_told_why() -> None:
    fits = memory(10, {"a": 6, "b": 5, "c": 1})
    places = admit([candidate("a", age=3), candidate("b", age=2), candidate("c", age=1)], [], fits)
    assert places["b"].verdict == Verdict(False, 0, 11, 10)
    assert places["c"].behind == candidate("b", age=2)


sizes = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 12), max_size=8)


@given(sizes, st.integers(0, 20), st.data())
def test_admitted_tasks_always_fit_and_are_first_in_order(
    each: Sizes, budget: int, data: st.DataObject
) -> None:
    waiting = [candidate(uid, data.draw(st.integers(-1, 1)), data.draw(st.integers(0, 2))) for uid in each]
    places = admit(waiting, [], memory(budget, each))
    admitted = [uid for uid, place in places.items() if place.outcome is A]
    assert sum(each[uid] for uid in admitted) <= budget
    assert set(places) == set(each)
    able = [one.uid for one in in_order(waiting) if each[one.uid] <= budget]
    assert able[: len(admitted)] == [uid for uid in able if uid in admitted]


@given(sizes, st.integers(1, 20))
def test_memory_is_never_idle_while_the_first_in_line_fits(each: Sizes, budget: int) -> None:
    places = admit([candidate(uid) for uid in each], [], memory(budget, each))
    admitted = sum(each[uid] for uid, place in places.items() if place.outcome is A)
    first = next((one.uid for one in in_order(map(candidate, each)) if places[one.uid].outcome is W), None)
    assert first is None or admitted + each[first] > budget
