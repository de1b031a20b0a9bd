"""What each policy says of who goes first and who takes whose place."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.scheduling.entrant import Entrant, EntrantProgress, EntrantState
from mlora_operator.scheduling.fair_share import FairShare
from mlora_operator.scheduling.order import Candidate
from mlora_operator.scheduling.priority import Priority
from mlora_operator.scheduling.shortest_remaining import ShortestRemaining

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def entrant(
    name: str,
    left: int | None,
    priority: int = 0,
    namespace: str = "a",
    state: EntrantState = EntrantState.WAITING,
) -> Entrant:
    """With so many tokens left; named in the order of age."""
    created = NOON + timedelta(seconds=ord(name))
    return Entrant(
        Candidate(name, namespace, name, priority, created), state, NOON, EntrantProgress(0, left, 1.0)
    )


def names(ordered: object) -> str:
    return "".join(one.task.name for one in ordered)  # type: ignore[attr-defined]


def test_the_shortest_goes_first_among_equals_and_the_unknown_last() -> None:
    tasks = [entrant("a", None), entrant("b", 9), entrant("c", 3), entrant("d", 50, priority=1)]
    assert names(ShortestRemaining().order(tasks)) == "dcba"


def test_a_short_task_takes_the_place_of_one_twice_as_long() -> None:
    policy = ShortestRemaining()
    assert policy.displaces(entrant("a", 5), entrant("b", 10))
    assert not policy.displaces(entrant("a", 5), entrant("b", 9))
    assert policy.displaces(entrant("a", 5), entrant("b", None))
    assert not policy.displaces(entrant("a", None), entrant("b", 9))
    assert not policy.displaces(entrant("a", 1), entrant("b", 99, priority=1))
    assert policy.displaces(entrant("a", 99, priority=1), entrant("b", 1))


def test_what_is_left_of_one_that_has_waited_counts_for_less() -> None:
    hold_back = timedelta(minutes=10)
    late = entrant("b", 16)._replace(since=NOON + hold_back)
    tasks = [entrant("a", 40), late, entrant("c", 11, state=EntrantState.RUNNING)]
    found = {
        minutes: names(ShortestRemaining(NOON + timedelta(minutes=minutes), hold_back).order(tasks))
        for minutes in (10, 15, 30)
    }
    assert found == {10: "cba", 15: "bca", 30: "bac"}


def test_one_that_has_waited_before_it_got_its_place_is_not_sent_away_for_what_would_have_gone_after_it() -> (
    None
):
    policy = ShortestRemaining(NOON + timedelta(hours=9), timedelta(minutes=10))
    at_once = entrant("b", 99, state=EntrantState.RUNNING)._replace(since=NOON + timedelta(seconds=ord("b")))
    waited = at_once._replace(since=at_once.since + timedelta(minutes=20))
    assert policy.displaces(entrant("a", 17), at_once)
    assert not policy.displaces(entrant("a", 17), waited)
    assert policy.displaces(entrant("a", 16), waited)
    assert policy.displaces(entrant("a", 99, priority=1), waited)


@given(st.integers(0, 50), st.integers(0, 50))
def test_two_tasks_never_take_each_others_place(one: int, other: int) -> None:
    first, second = entrant("a", one), entrant("b", other)
    policy = ShortestRemaining()
    assert not (policy.displaces(first, second) and policy.displaces(second, first))


def test_namespaces_take_turns_by_what_they_were_served_and_have_before() -> None:
    tasks = [entrant(name, 10, namespace="x") for name in "abc"]
    tasks += [entrant(name, 10, namespace="y") for name in "def"]
    assert names(FairShare().order(tasks)) == "adbecf"
    assert names(FairShare(served={"x": 15}).order(tasks)) == "deafbc"
    assert names(FairShare(weights={"x": 3.0}).order(tasks)) == "adbcef"


def test_a_task_whose_tokens_are_not_known_counts_as_much_as_the_usual_one() -> None:
    """a is taken for the mean of c and d, which is 4: b comes as early as d, and is older."""
    tasks = [entrant("a", None, namespace="x"), entrant("b", None, namespace="x")]
    tasks += [
        entrant("c", 4, namespace="y"),
        entrant("d", 4, namespace="y"),
        entrant("e", None, namespace="y"),
    ]
    assert names(FairShare().order(tasks)) == "acbde"
    alone = [entrant(name, None, namespace=namespace) for name, namespace in ("ax", "bx", "cy")]
    assert names(FairShare().order(alone)) == "acb"


def test_within_a_namespace_an_equal_one_displaces_nobody() -> None:
    assert not FairShare().displaces(entrant("a", 1), entrant("b", 9))


def test_within_a_namespace_priority_counts_and_not_across() -> None:
    tasks = [entrant("a", 10), entrant("b", 10, priority=5), entrant("c", 10, priority=9, namespace="y")]
    policy = FairShare(served={"y": 100})
    assert names(policy.order(tasks)) == "bac"
    assert policy.displaces(tasks[1], tasks[0])
    assert not policy.displaces(tasks[2], tasks[0])


def test_another_namespace_is_displaced_when_it_is_a_quantum_ahead() -> None:
    mine, theirs = entrant("a", 10, namespace="x"), entrant("b", 10, namespace="y")
    assert FairShare({"y": 101}, quantum=100).displaces(mine, theirs)
    assert not FairShare({"y": 100}, quantum=100).displaces(mine, theirs)
    assert not FairShare({"y": 101}, {"y": 2.0}, quantum=100).displaces(mine, theirs)
    assert not FairShare({"y": 1e9}).displaces(mine, theirs)


def test_of_namespaces_that_were_served_the_same_nobody_goes_first_by_a_priority() -> None:
    tasks = [entrant("a", 10, namespace="x"), entrant("b", 10, priority=1_000_000, namespace="y")]
    assert names(FairShare().order(tasks)) == "ab"
    assert names(FairShare(served={"x": 1}).order(tasks)) == "ba"


def test_a_namespace_that_puts_a_younger_task_first_is_as_young_as_that() -> None:
    """y would else go before x by the age of a task that it does not want first."""
    tasks = [entrant("a", 10, namespace="y"), entrant("b", 10, namespace="x")]
    tasks += [entrant("c", 10, priority=1, namespace="y")]
    assert names(FairShare().order(tasks)) == "bca"


anybody = st.builds(
    Entrant,
    st.builds(
        Candidate,
        st.uuids().map(str),
        st.just("a"),
        st.text("ab", max_size=2),
        st.integers(-2, 2),
        st.sampled_from([NOON + timedelta(seconds=seconds) for seconds in range(3)]),
    ),
    st.sampled_from(EntrantState),
    st.just(NOON),
    st.builds(
        EntrantProgress, st.integers(0, 5), st.none() | st.integers(0, 9), st.none() | st.floats(0, 1e6)
    ),
)


@given(st.lists(anybody, max_size=8), st.floats(0, 1e12), st.floats(0.001, 1000), st.floats(0, 1e9))
def test_of_one_namespace_fair_shares_are_priorities(
    tasks: list[Entrant], served: float, weight: float, quantum: float
) -> None:
    fair = FairShare({"a": served}, {"a": weight}, quantum)
    assert list(fair.order(tasks)) == list(Priority().order(tasks))
    for one in tasks:
        for other in tasks:
            assert fair.displaces(one, other) == Priority().displaces(one, other)
