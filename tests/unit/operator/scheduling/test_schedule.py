"""Who gets a place, who has to leave, who waits for what; each with the default policy unless it says otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.scheduling.admission import Admission, AdmissionOutcome, MemoryCheck
from mlora_operator.scheduling.entrant import Entrant, EntrantProgress, EntrantState
from mlora_operator.scheduling.fair_share import FairShare
from mlora_operator.scheduling.memory import WholeSetMemory
from mlora_operator.scheduling.order import Candidate
from mlora_operator.scheduling.priority import Priority
from mlora_operator.scheduling.schedule import schedule
from mlora_operator.scheduling.words import must_leave, not_yet

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
BUDGET = 10
W, S, R, L, V = (
    EntrantState.WAITING,
    EntrantState.STARTING,
    EntrantState.RUNNING,
    EntrantState.LEAVING,
    EntrantState.SAVING,
)
IN, OUT, WAIT, NEVER = (
    AdmissionOutcome.ADMITTED,
    AdmissionOutcome.PREEMPTED,
    AdmissionOutcome.WAITING,
    AdmissionOutcome.NEVER_FITS,
)


@dataclass(frozen=True)
class T:
    """A task of the tables. Names sort by age: "a" is older than "b"."""

    name: str
    size: int
    state: EntrantState = W
    priority: int = 0
    steps: int | None = None
    waited: float = 0  # seconds

    @property
    def entrant(self) -> Entrant:
        created = NOON - timedelta(days=1) + timedelta(seconds=ord(self.name))
        task = Candidate(self.name, "team-a", self.name, self.priority, created)
        return Entrant(
            task, self.state, NOON - timedelta(seconds=self.waited), EntrantProgress(0, self.steps, 100.0)
        )


def place(
    tasks: Sequence[T], hold_back: float = 600, budget: int = BUDGET, held: int = 0
) -> Mapping[str, Admission]:
    """``held``: by tasks that are out."""
    sizes = {task.name: task.size for task in tasks}

    def fits(uids: Sequence[str], more: int = 0) -> MemoryCheck:
        needed = sum(sizes[uid] for uid in uids) + more
        return MemoryCheck(needed <= budget, 0, needed, budget)

    entrants = [task.entrant for task in tasks]
    memory = WholeSetMemory(fits, lambda uids: fits(uids, held))
    return schedule(entrants, memory, Priority(), NOON, timedelta(seconds=hold_back))


STORIES: list[tuple[str, list[T], dict[str, AdmissionOutcome]]] = [
    ("nothing to do", [], {}),
    ("all fit", [T("a", 4), T("b", 6)], {"a": IN, "b": IN}),
    ("the higher priority first", [T("a", 8), T("b", 8, priority=1)], {"b": IN, "a": WAIT}),
    ("of equal priority the older", [T("b", 8), T("a", 8)], {"a": IN, "b": WAIT}),
    ("one that fits passes one that does not", [T("a", 6), T("b", 5), T("c", 4)], {"a": IN, "b": WAIT, "c": IN}),
    ("what never fits is told so at once, in nobody's way", [T("a", 11), T("b", 10)], {"a": NEVER, "b": IN}),
    ("what never fits is told so behind one that waits", [T("a", 9, R), T("b", 5), T("c", 11)],
     {"a": IN, "b": WAIT, "c": NEVER}),
    ("what trains keeps its place though it fits no more", [T("a", 12, R), T("b", 1)], {"a": IN, "b": WAIT}),
    ("of those that start, who does not fit any more waits again, the last first",
     [T("a", 6, R), T("b", 3, S), T("c", 2, S)], {"a": IN, "b": IN, "c": WAIT}),
    ("who starts waits again before one that trains, whatever their order",
     [T("a", 6, S, 1), T("b", 6, R)], {"a": WAIT, "b": IN}),
    ("the room of one that waits again is nobody's yet",
     [T("a", 7, R), T("b", 2, S), T("c", 3, S), T("d", 1)], {"a": IN, "b": IN, "c": WAIT, "d": WAIT}),
    ("those that start wait as long as those that train do not fit by themselves",
     [T("a", 12, R), T("b", 1, S)], {"a": IN, "b": WAIT}),
    # preemption
    ("a higher one displaces a lower one", [T("a", 8, R), T("b", 5, priority=1)], {"a": OUT, "b": WAIT}),
    ("an equal one does not", [T("b", 8, R), T("a", 5)], {"b": IN, "a": WAIT}),
    ("the lowest priority leaves first", [T("a", 5, R, 1), T("b", 5, R), T("c", 5, priority=2)],
     {"a": IN, "b": OUT, "c": WAIT}),
    ("of equal priority the newest leaves first", [T("a", 5, R), T("b", 5, R), T("c", 5, priority=2)],
     {"a": IN, "b": OUT, "c": WAIT}),
    ("nobody leaves when that does not help", [T("a", 5, R, 9), T("b", 5, R), T("c", 6, priority=1)],
     {"a": IN, "b": IN, "c": WAIT}),
    ("nobody leaves when there is room", [T("a", 5, R), T("b", 5, priority=1)], {"a": IN, "b": IN}),
    ("who did not help is spared again", [T("a", 7, R), T("b", 2, R), T("c", 1, R), T("d", 6, priority=1)],
     {"a": OUT, "b": IN, "c": IN, "d": WAIT}),
    ("one that saves is never displaced", [T("a", 8, V), T("b", 5, priority=1)], {"a": IN, "b": WAIT}),
    ("one that starts has to begin first; its room is promised",
     [T("a", 8, S), T("b", 5, priority=2), T("c", 2, priority=1), T("d", 3)],
     {"a": IN, "b": WAIT, "c": IN, "d": WAIT}),
    ("one that leaves holds its memory until it is out", [T("a", 8, L), T("b", 5, priority=1)],
     {"a": OUT, "b": WAIT}),
    ("and then the room goes to who it left for", [T("a", 8), T("b", 5, priority=1)], {"a": WAIT, "b": IN}),
    ("nobody takes the room that somebody leaves for another", [T("a", 8, L), T("b", 9, priority=1), T("c", 2)],
     {"a": OUT, "b": WAIT, "c": WAIT}),
    ("who fits beside both may begin", [T("a", 7, L), T("b", 8, priority=1), T("c", 2)],
     {"a": OUT, "b": WAIT, "c": IN}),
    ("who may begin beside one that leaves counts for the next",
     [T("a", 6, L), T("b", 2), T("c", 2), T("d", 1)], {"a": OUT, "b": IN, "c": IN, "d": WAIT}),
    ("nobody else has to leave while the room is made", [T("a", 5, L), T("b", 5, R), T("c", 5, priority=1)],
     {"a": OUT, "b": IN, "c": WAIT}),
    ("a yet higher one takes what was promised", [T("a", 8, L), T("b", 9, priority=1), T("c", 9, priority=2)],
     {"a": OUT, "b": WAIT, "c": WAIT}),
    ("two higher ones displace two", [T("a", 5, R), T("b", 5, R), T("c", 4, priority=1), T("d", 4, priority=1)],
     {"a": OUT, "b": OUT, "c": WAIT, "d": WAIT}),
    ("who would have left for one is spared when another one leaves for the next",
     [T("a", 3, R), T("b", 5, R, 1), T("c", 3, priority=2), T("d", 3, priority=2)],
     {"a": IN, "b": OUT, "c": WAIT, "d": WAIT}),
    ("and gives way once more to whoever comes after",
     [T("a", 3, R), T("b", 5, R, 1), T("c", 3, priority=2), T("d", 3, priority=2), T("e", 4, priority=2)],
     {"a": OUT, "b": OUT, "c": WAIT, "d": WAIT, "e": WAIT}),
    # a big task behind small ones
    ("who has waited for long is passed by nobody", [T("a", 6, R), T("b", 5, waited=600), T("c", 1)],
     {"a": IN, "b": WAIT, "c": WAIT}),
    ("not even by one of lower priority", [T("a", 6, R), T("b", 5, waited=600), T("c", 1, priority=-1)],
     {"a": IN, "b": WAIT, "c": WAIT}),
    ("but by one of higher priority", [T("a", 6, R), T("b", 5, waited=600), T("c", 1, priority=1)],
     {"a": IN, "b": WAIT, "c": IN}),
    ("and by one that is done before", [T("a", 6, R, steps=10), T("b", 5, waited=600), T("c", 1, steps=5)],
     {"a": IN, "b": WAIT, "c": IN}),
    ("if that is sure", [T("a", 6, R, steps=10), T("b", 5, waited=600), T("c", 1, steps=6)],
     {"a": IN, "b": WAIT, "c": WAIT}),
    ("which it is not while one saves", [T("a", 6, V, steps=10), T("b", 5, waited=600), T("c", 1, steps=1)],
     {"a": IN, "b": WAIT, "c": WAIT}),
    ("nor with unknown steps", [T("a", 6, R, steps=10), T("b", 5, waited=600), T("c", 1)],
     {"a": IN, "b": WAIT, "c": WAIT}),
    ("and whoever has passed is one of those who may be done first",
     [T("a", 6, R, steps=10), T("b", 5, waited=600), T("c", 1, steps=5), T("d", 1, steps=5)],
     {"a": IN, "b": WAIT, "c": IN, "d": WAIT}),
    ("that is: before anybody who trains may be done",
     [T("a", 4, R, steps=4), T("b", 5, R, steps=20), T("c", 8, waited=600), T("d", 1, steps=3)],
     {"a": IN, "b": IN, "c": WAIT, "d": WAIT}),
    ("whoever passes displaces nobody",
     [T("a", 8, R, 5, steps=99), T("b", 2, R, -1, steps=99), T("c", 9, waited=600), T("d", 1, steps=3)],
     {"a": IN, "b": IN, "c": WAIT, "d": WAIT}),
]  # fmt: skip


@pytest.mark.parametrize(("story", "tasks", "expected"), STORIES, ids=[story for story, *_ in STORIES])
def test_places(story: str, tasks: list[T], expected: dict[str, AdmissionOutcome]) -> None:
    assert {uid: one.outcome for uid, one in place(tasks).items()} == expected, story


# What tasks that are out still hold, and places beside it.
LINGERING: list[tuple[str, int, list[T], dict[str, AdmissionOutcome]]] = [
    ("a task alone waits for what it left behind itself", 3, [T("a", 8)], {"a": WAIT}),
    ("and is let in once that is free enough", 2, [T("a", 8)], {"a": IN}),
    ("whatever is held, one that fits alone is never told that it never will", 10, [T("a", 10)], {"a": WAIT}),
    ("one that never fits is told so all the same", 3, [T("a", 11)], {"a": NEVER}),
    ("who trains keeps its place", 9, [T("a", 8, R), T("b", 2)], {"a": IN, "b": WAIT}),
    ("who starts keeps its place", 9, [T("a", 8, S)], {"a": IN}),
    ("its room is promised: nobody after it gets that", 3, [T("a", 8), T("b", 3)], {"a": WAIT, "b": WAIT}),
    ("a smaller one that fits beside all may begin", 3, [T("a", 6), T("b", 4), T("c", 1)],
     {"a": IN, "b": WAIT, "c": WAIT}),
    ("several that have left count together", 5, [T("a", 4), T("b", 4)], {"a": IN, "b": WAIT}),
    ("beside one that leaves, both count", 2, [T("a", 4, L), T("b", 5)], {"a": OUT, "b": WAIT}),
    ("and one that fits beside both begins", 2, [T("a", 4, L), T("b", 4)], {"a": OUT, "b": IN}),
]  # fmt: skip


@pytest.mark.parametrize(("story", "held", "tasks", "expected"), LINGERING, ids=[one[0] for one in LINGERING])
def test_places_beside_what_tasks_that_are_out_hold(
    story: str, held: int, tasks: list[T], expected: dict[str, AdmissionOutcome]
) -> None:
    assert {uid: one.outcome for uid, one in place(tasks, held=held).items()} == expected, story


def test_one_that_waits_for_what_is_still_held_is_told_so() -> None:
    waits = place([T("a", 8)], held=3)["a"]
    assert waits.lingers
    assert "tasks that have left the pipeline still use some of its memory" in not_yet(waits, "team-a")


def test_each_is_told_why_it_waits_or_leaves() -> None:
    places = place([T("a", 8, R), T("b", 5, priority=1), T("c", 9, priority=0, waited=999), T("d", 1)])
    assert places["a"].displaced_by == T("b", 5, priority=1).entrant.task
    assert must_leave(places["a"], "team-a").startswith("the task is preempted by team-a/b")
    assert not_yet(places["b"], "team-a") == "the task is admitted once team-a/a has left the pipeline"
    assert places["c"].check == MemoryCheck(False, 0, 14, 10)
    assert (
        not_yet(places["d"], "team-a")
        == "the task waits behind team-a/c, which has waited longer than scheduling.holdBack"
    )


def test_a_task_is_told_of_one_that_leaves_though_the_one_that_was_to_leave_for_it_is_spared() -> None:
    places = place([T("a", 3, R), T("b", 5, R, 1), T("c", 3, priority=2), T("d", 3, priority=2)])
    left = T("b", 5, R, 1).entrant.task
    assert (places["c"].after, places["d"].after) == (left, left)
    assert places["b"].displaced_by == T("d", 3, priority=2).entrant.task


def test_the_room_of_one_that_saves_is_promised_to_nobody() -> None:
    places = place([T("a", 8, V), T("b", 5, priority=1)])
    assert places["b"].after is None
    assert places["b"].check == MemoryCheck(False, 0, 13, 10)


def test_a_task_is_told_of_the_first_that_leaves_for_it() -> None:
    places = place([T("a", 5, R), T("b", 5, R), T("c", 9, priority=1)])
    assert not_yet(places["c"], "team-a") == "the task is admitted once team-a/b has left the pipeline"


def test_nobody_displaces_one_that_goes_before_it_though_the_policy_would_allow_it() -> None:
    """team-b is far ahead, but its task goes before the second one of team-a, which stands behind the first."""
    sizes = {"a": 1, "b": 5, "r": 8}

    def entrant(name: str, namespace: str, state: EntrantState, left: int) -> Entrant:
        created = NOON + timedelta(seconds=ord(name))
        return Entrant(
            Candidate(name, namespace, name, 0, created), state, NOON, EntrantProgress(0, left, 1.0)
        )

    def fits(uids: Sequence[str]) -> MemoryCheck:
        needed = sum(sizes[uid] for uid in uids)
        return MemoryCheck(needed <= BUDGET, 0, needed, BUDGET)

    tasks = [entrant("a", "team-a", W, 200), entrant("b", "team-a", W, 9), entrant("r", "team-b", R, 9)]
    policy = FairShare({"team-b": 100.0}, quantum=10.0)
    assert policy.displaces(tasks[1], tasks[2])
    places = schedule(tasks, WholeSetMemory(fits), policy, NOON)
    assert {uid: one.outcome for uid, one in places.items()} == {"a": IN, "b": WAIT, "r": IN}


def test_however_many_have_waited_the_same_rule_holds() -> None:
    waiting = [T(name, 9, waited=999) for name in "cdefghijk"]
    running = [T("a", 2, R, steps=4), T("b", 6, R, steps=100)]
    assert place([*running, *waiting, T("x", 1, steps=3)])["x"].outcome is WAIT
    assert place([*running, *waiting, T("x", 1, steps=2)])["x"].outcome is IN


def told(places: Mapping[str, Admission]) -> dict[str, tuple[object, ...]]:
    return {
        uid: (one.outcome, one.check, one.behind, one.after, one.displaced_by) for uid, one in places.items()
    }


tasks_ = st.lists(
    st.builds(
        T,
        st.sampled_from("abcdefghij"),
        st.integers(1, 12),
        st.sampled_from(EntrantState),
        st.integers(0, 2),
        st.one_of(st.none(), st.integers(0, 9)),
        st.sampled_from([0.0, 700.0]),
    ),
    unique_by=lambda task: task.name,
    max_size=10,
)


@given(tasks_, st.integers(1, 20), st.randoms())
def test_the_rules_hold_for_any_tasks(tasks: list[T], budget: int, random: object) -> None:
    places = place(tasks, budget=budget)
    shuffled = list(tasks)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert told(place(shuffled, budget=budget)) == told(places)
    assert set(places) == {task.name for task in tasks}
    outcome = {task.name: places[task.name].outcome for task in tasks}
    inside = [task for task in tasks if task.state is not W]
    admitted = [task for task in tasks if task.state is W and outcome[task.name] is IN]
    staying = [task for task in inside if outcome[task.name] is IN]

    # Never over the memory: who leaves still counts. What was over before lets nobody in.
    assert not admitted or sum(task.size for task in (*inside, *admitted)) <= budget
    # Only who trains can be told to leave, and only for a higher one.
    for task in inside:
        if outcome[task.name] is OUT and task.state is not L:
            by = places[task.name].displaced_by
            assert task.state is R
            assert by is not None
            assert by.priority > task.priority
    for task in tasks:
        if task.state is not W:
            continue
        if task.size > budget:
            assert outcome[task.name] is NEVER
        elif outcome[task.name] is WAIT and places[task.name].check is not None:
            # It does not fit, not even without those that have to give way to it.
            firm = [one for one in staying if one.priority >= task.priority or one.state is V]
            promised = [
                one
                for one in tasks
                if one.state is W and (one in admitted or places[one.name].after is not None)
                and (-one.priority, one.name) < (-task.priority, task.name)
            ]  # fmt: skip
            assert sum(one.size for one in (*firm, *promised, task)) > budget


@given(tasks_, st.integers(1, 20))
def test_nobody_has_to_leave_in_vain(tasks: list[T], budget: int) -> None:
    """With any one of the displaced still there, somebody who is promised a place would not fit."""
    places = place(tasks, budget=budget)
    victims = [task for task in tasks if task.state is R and places[task.name].outcome is OUT]
    if not victims or sum(task.size for task in tasks if task.state not in (W, L)) > budget:
        return
    promised = [task for task in tasks if task.state is W and places[task.name].after is not None]
    later = [
        task
        for task in tasks
        if (task.state in (S, R, V) or task.state is W)
        and (places[task.name].outcome is IN)
        and not any(  # a starting one whose room is promised
            task.state is S and one.priority > task.priority for one in promised
        )
    ]
    for victim in victims:
        assert sum(task.size for task in (*later, *promised, victim)) > budget or any(
            task.state is S for task in tasks
        )
