"""Priority, then first come; of the same second, by how long they are."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.scheduling.entrant import Entrant, EntrantProgress, EntrantState
from mlora_operator.scheduling.first_come import first_come
from mlora_operator.scheduling.order import Candidate

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
W, R = EntrantState.WAITING, EntrantState.RUNNING


def entrant(
    name: str,
    steps: int | None = None,
    age: int = 0,
    priority: int = 0,
    state: EntrantState = W,
    done: int = 0,
    tokens: float | None = 100.0,
) -> Entrant:
    created = NOON - timedelta(seconds=age)
    return Entrant(
        Candidate(name, "a", name, priority, created), state, NOON, EntrantProgress(done, steps, tokens)
    )


STORIES = [
    ("nobody", [], ""),
    ("of those that came together and wait alone, the longest", [entrant("a", 1), entrant("b", 3), entrant("c", 2)], "bca"),
    ("while an older one waits, too, the shortest",
     [entrant("a", 3), entrant("b", 1), entrant("c", 2), entrant("d", 9, age=1)], "dbca"),
    ("while a lower one waits, too, the shortest", [entrant("a", 3), entrant("b", 1), entrant("c", 9, priority=-1)], "bac"),
    ("one that trains is not one that waits", [entrant("a", 1), entrant("b", 3), entrant("c", 9, age=1, state=R)], "cba"),
    ("one that has a place stands before those that came with it",
     [entrant("a", 1), entrant("b", 3), entrant("c", 2, state=R)], "cba"),
    ("tokens count, not steps", [entrant("a", 3, tokens=1.0), entrant("b", 1)], "ba"),
    ("all of them, not those that are left", [entrant("a", 9, done=8), entrant("b", 3)], "ab"),
    ("older ones first, however short the others", [entrant("a", 1), entrant("b", 9, age=1)], "ba"),
    ("and the higher priority before", [entrant("a", 1, age=1), entrant("b", 9, priority=1)], "ba"),
    ("unknown tokens last", [entrant("a"), entrant("b", 3, tokens=None), entrant("c", 1)], "cab"),
    ("also of the shortest", [entrant("a"), entrant("b", 3), entrant("c", 1), entrant("d", age=1)], "dcba"),
    ("as many: by name", [entrant("b", 2), entrant("a", 2), entrant("c", 2)], "abc"),
]  # fmt: skip


@pytest.mark.parametrize(("story", "tasks", "expected"), STORIES, ids=[story for story, *_ in STORIES])
def test_order(story: str, tasks: list[Entrant], expected: str) -> None:
    assert "".join(one.task.name for one in first_come(tasks)) == expected, story


many = st.lists(
    st.builds(
        entrant,
        st.sampled_from("abcdefghij"),
        st.one_of(st.none(), st.integers(0, 3)),
        st.integers(0, 2),
        st.integers(0, 1),
        st.sampled_from(EntrantState),
    ),
    unique_by=lambda one: one.uid,
)


@given(many, st.randoms())
def test_the_order_is_total_and_keeps_priorities_and_seconds(tasks: list[Entrant], random: object) -> None:
    shuffled = list(tasks)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    ordered = first_come(shuffled)
    assert ordered == first_come(tasks)
    assert sorted(one.uid for one in ordered) == sorted(one.uid for one in tasks)
    ranks = [one.task.rank for one in ordered]
    assert ranks == sorted(ranks)


@given(many, st.integers(1, 9))
def test_a_step_changes_no_order(tasks: list[Entrant], steps: int) -> None:
    later = [one._replace(progress=one.progress._replace(step=steps)) for one in tasks]
    assert [one.uid for one in first_come(later)] == [one.uid for one in first_come(tasks)]
