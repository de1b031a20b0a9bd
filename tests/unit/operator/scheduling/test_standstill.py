"""For how long a decision holds by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from mlora_operator.scheduling.admission import Admission, MemoryCheck
from mlora_operator.scheduling.entrant import Entrant, EntrantProgress, EntrantState
from mlora_operator.scheduling.memory import WholeSetMemory
from mlora_operator.scheduling.order import Candidate
from mlora_operator.scheduling.priority import Priority
from mlora_operator.scheduling.schedule import schedule
from mlora_operator.scheduling.standstill import FOR_EVER, NO_TIME, holds_for
from tests.fixtures.stories import stories

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOLD_BACK = timedelta(seconds=600)
BUDGET = 10


def entrant(
    name: str, state: EntrantState, steps: int | None = 9, waited: float = 0, priority: int = 0, done: int = 0
) -> Entrant:
    created = NOON - timedelta(days=1) + timedelta(seconds=ord(name))
    since = NOON - timedelta(seconds=waited)
    return Entrant(
        Candidate(name, "a", name, priority, created), state, since, EntrantProgress(done, steps, 1.0)
    )


def decide(entrants: Sequence[Entrant], sizes: Mapping[str, int], now: datetime) -> Mapping[str, Admission]:
    def fits(uids: Sequence[str]) -> MemoryCheck:
        needed = sum(sizes[uid] for uid in uids)
        return MemoryCheck(needed <= BUDGET, 0, needed, BUDGET)

    return schedule(entrants, WholeSetMemory(fits), Priority(), now, HOLD_BACK)


def held(entrants: Sequence[Entrant], sizes: Mapping[str, int]) -> timedelta:
    return holds_for(entrants, decide(entrants, sizes, NOON), NOON, HOLD_BACK)


def test_a_decision_that_moves_somebody_holds_for_no_time() -> None:
    assert held([entrant("a", EntrantState.WAITING)], {"a": 1}) == NO_TIME
    displacing = [entrant("a", EntrantState.RUNNING), entrant("b", EntrantState.WAITING, priority=1)]
    assert held(displacing, {"a": 8, "b": 8}) == NO_TIME


def test_one_under_which_all_wait_holds_until_one_of_them_may_be_passed_no_more() -> None:
    inside = entrant("a", EntrantState.RUNNING)
    waiting = [entrant("b", EntrantState.WAITING, waited=100), entrant("c", EntrantState.WAITING, waited=400)]
    sizes = {"a": 8, "b": 5, "c": 6}
    assert held([inside, *waiting], sizes) == timedelta(seconds=200)
    assert held([inside, waiting[0]], sizes) == timedelta(seconds=500)
    assert held([inside, entrant("d", EntrantState.WAITING, waited=700)], {"a": 8, "d": 9}) == FOR_EVER


def test_nobody_waits() -> None:
    assert held([entrant("a", EntrantState.RUNNING)], {"a": 8}) == FOR_EVER


def told(places: Mapping[str, Admission]) -> Mapping[str, tuple[object, ...]]:
    return {
        uid: (one.outcome, one.check, one.behind, one.after, one.displaced_by) for uid, one in places.items()
    }


crowds = st.lists(
    st.tuples(
        st.builds(
            entrant,
            st.sampled_from("abcdefgh"),
            st.sampled_from([EntrantState.WAITING, EntrantState.WAITING, *EntrantState]),
            st.one_of(st.none(), st.integers(0, 20)),
            st.sampled_from([0.0, 300.0, 590.0, 700.0]),
            st.integers(0, 1),
        ),
        st.integers(2, 11),
    ),
    unique_by=lambda pair: pair[0].uid,
    min_size=1,
    max_size=8,
)


@given(crowds, st.lists(st.integers(0, 9), min_size=8, max_size=8), st.floats(0, 1))
@settings(max_examples=stories(150))
def test_a_decision_holds_while_those_inside_train_on(
    crowd: list[tuple[Entrant, int]], steps: list[int], part: float
) -> None:
    sizes = {one.uid: size for one, size in crowd}
    before = [one for one, _ in crowd]
    holds = held(before, sizes)
    if holds == NO_TIME:
        return
    later = NOON + part * min(holds - timedelta(microseconds=1), timedelta(hours=1))
    after = [
        one if one.state is EntrantState.WAITING else one._replace(progress=one.progress._replace(step=done))
        for one, done in zip(before, steps, strict=False)
    ]
    assert told(decide(after, sizes, later)) == told(decide(before, sizes, NOON))
