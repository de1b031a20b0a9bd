"""Promises of the scheduler over whole lives of tasks, on simulated pipelines."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.scheduling.simulate import Delays, Life, SimMemory, SimPipeline, SimTask
from mlora_operator.scheduling.admission import Admission, AdmissionOutcome
from mlora_operator.scheduling.entrant import Entrant, EntrantState
from mlora_operator.scheduling.fair_share import FairShare
from mlora_operator.scheduling.policy import Policy
from mlora_operator.scheduling.priority import Priority
from mlora_operator.scheduling.schedule import schedule
from mlora_operator.scheduling.shortest_remaining import ShortestRemaining
from tests.fixtures.stories import stories

HOLD_BACK = 50.0
BUDGET = 100
DELAYS = Delays(load=1, checkpoint=2, save=1)


def pace(tasks: Sequence[SimTask]) -> Mapping[str, float]:
    """A round of all tasks: one second for each thousand tokens."""
    seconds = sum(task.step_tokens for task in tasks) / 1000
    return {task.uid: seconds for task in tasks}


def ours(
    policy: Policy, entrants: Sequence[Entrant], memory: SimMemory, now: datetime
) -> Mapping[str, Admission]:
    hold_back = timedelta(seconds=HOLD_BACK)
    if isinstance(policy, ShortestRemaining):
        policy = ShortestRemaining(now, hold_back)
    return schedule(entrants, memory, policy, now, hold_back)


def pipeline(
    tasks: Sequence[SimTask], policy: Policy, delays: Delays = DELAYS, **fields: object
) -> SimPipeline:
    return SimPipeline(tasks, BUDGET, partial(ours, policy), pace, delays, hold_back=HOLD_BACK, **fields)  # type: ignore[arg-type]


def some_tasks(number: int, seed: int, rush: float = 3.0) -> list[SimTask]:
    """Of mixed sizes and priorities; now and then one that never fits."""
    rng = random.Random(seed)
    arrival, tasks = 0.0, []
    for index in range(number):
        arrival += rng.expovariate(1 / rush)
        tasks.append(
            SimTask(
                uid=f"t{index:05}",
                arrival=arrival,
                steps=rng.randint(1, 12),
                step_tokens=rng.choice([200, 500, 1000]),
                own=rng.choice([5, 10, 20, 40, 80]) if rng.random() > 0.02 else 120,
                shared=rng.choice([1, 5, 10]),
                priority=rng.choice([0, 0, 0, 1, 2]),
                namespace=rng.choice("abc"),
            )
        )
    return tasks


tasks_ = st.lists(
    st.builds(
        SimTask,
        st.integers(0, 10**6).map(str),
        st.integers(0, 60).map(float),
        st.integers(1, 8),
        st.sampled_from([200, 1000]),
        st.integers(1, 110),
        st.integers(0, 10),
        st.integers(0, 2),
        st.sampled_from("abc"),
    ),
    unique_by=lambda task: task.uid,
    min_size=1,
    max_size=12,
)
POLICIES: list[Policy] = [Priority(), ShortestRemaining(), FairShare(weights={"a": 2.0})]


def watch_memory(now: float, lives: Mapping[str, Life], _: Mapping[str, Admission]) -> None:
    inside = [life.task for life in lives.values() if life.state not in (None, EntrantState.WAITING)]
    shared = max((task.shared for task in inside), default=0)
    assert sum(task.own for task in inside) + shared <= BUDGET, f"over the memory at {now}"


def watch_ranks(now: float, lives: Mapping[str, Life], places: Mapping[str, Admission]) -> None:
    """No task goes on training while one of higher priority waits that would fit in its stead."""
    holding = [life for life in lives.values() if life.place is AdmissionOutcome.ADMITTED]
    promised = [lives[uid] for uid, place in places.items() if place.after is not None]
    for uid, place in places.items():
        waits = lives[uid]
        if (
            place.outcome is not AdmissionOutcome.WAITING
            or place.behind is not None
            or place.after is not None
        ):
            continue
        firm = [
            one.task
            for one in (*holding, *promised)
            if one.task.priority >= waits.task.priority or one.state is EntrantState.SAVING
        ]
        shared = max(task.shared for task in (*firm, waits.task))
        assert sum(task.own for task in (*firm, waits.task)) + shared > BUDGET, (
            f"{uid} waits in vain at {now}"
        )


@given(tasks_, st.sampled_from(POLICIES))
@settings(max_examples=stories(60))
def test_every_task_ends_and_memory_is_never_exceeded(tasks: list[SimTask], policy: Policy) -> None:
    lives = pipeline(tasks, policy, watch=watch_memory).run()
    for life in lives.values():
        never = life.task.own + life.task.shared > BUDGET
        assert (life.place is AdmissionOutcome.NEVER_FITS) == never
        assert (life.ended is None) == never
        assert never or life.done == life.task.steps


@given(tasks_)
@settings(max_examples=stories(60))
def test_no_lower_priority_trains_while_a_higher_one_that_fits_waits(tasks: list[SimTask]) -> None:
    pipeline(tasks, Priority(), watch=watch_ranks).run()


@given(tasks_, st.sampled_from(POLICIES), st.randoms())
@settings(max_examples=stories(30))
def test_the_same_tasks_always_live_the_same_lives(
    tasks: list[SimTask], policy: Policy, rng: random.Random
) -> None:
    shuffled = list(tasks)
    rng.shuffle(shuffled)
    assert pipeline(tasks, policy).run() == pipeline(shuffled, policy).run()


@given(tasks_)
@settings(max_examples=stories(30))
def test_of_equal_priority_nobody_is_ever_displaced(tasks: list[SimTask]) -> None:
    equal = [SimTask(one.uid, one.arrival, one.steps, one.step_tokens, one.own, one.shared) for one in tasks]
    assert not any(life.preemptions for life in pipeline(equal, Priority()).run().values())


@given(tasks_, st.sampled_from(POLICIES))
@settings(max_examples=stories(30))
def test_a_displacement_is_always_for_a_task_that_came_later_or_came_back(
    tasks: list[SimTask], policy: Policy
) -> None:
    """No two tasks push each other out in turn: displacements are bounded by the pairs of tasks."""
    lives = pipeline(tasks, policy).run().values()
    assert sum(life.preemptions for life in lives) <= len(tasks) * (len(tasks) - 1) / 2


@pytest.mark.parametrize("policy", POLICIES, ids=["priority", "shortestRemaining", "fairShare"])
def test_hundreds_of_tasks(policy: Policy) -> None:
    def watch(now: float, lives: Mapping[str, Life], places: Mapping[str, Admission]) -> None:
        watch_memory(now, lives, places)
        if isinstance(policy, Priority):
            watch_ranks(now, lives, places)

    lives = pipeline(
        some_tasks(1000 if isinstance(policy, Priority) else 300, 7, rush=6.0), policy, watch=watch
    ).run()
    ended = [life for life in lives.values() if life.ended is not None]
    never = [life for life in lives.values() if life.place is AdmissionOutcome.NEVER_FITS]
    assert len(ended) + len(never) == len(lives)
    assert all(life.task.own == 120 for life in never)
    assert any(life.preemptions for life in ended) or isinstance(policy, FairShare)


def test_a_big_task_behind_an_endless_stream_of_small_ones_gets_its_turn() -> None:
    small = [SimTask(f"s{number:03}", number * 1.0, 20, 100, 20) for number in range(300)]
    big = SimTask("big", 5.0, 3, 1000, 90)
    life = pipeline([*small, big], Priority()).run()["big"]
    assert life.begun is not None
    longest = 20 * 5 * 0.1 + 4  # rounds of five tasks, load, save
    assert HOLD_BACK < life.waited <= HOLD_BACK + longest + 1


def test_a_long_task_behind_an_endless_stream_of_short_ones_begins_in_time_and_gets_on() -> None:
    """It has four times as much left as they have, so it goes first once it has waited for three ``HOLD_BACK``."""
    short = [SimTask(f"s{number:03}", number * 11.0, 10, 1000, 50) for number in range(100)]
    long = SimTask("long", 0.5, 40, 1000, 100)
    life = pipeline([*short, long], ShortestRemaining()).run()["long"]
    assert life.begun is not None
    assert life.ended is not None
    assert HOLD_BACK < life.waited <= 4 * HOLD_BACK
    assert life.preemptions == 0, "what it has waited counts while it trains, too"


def test_without_the_hold_back_it_would_not() -> None:
    small = [SimTask(f"s{number:03}", number * 1.0, 20, 100, 20) for number in range(300)]
    big = SimTask("big", 5.0, 3, 1000, 90)

    def never(entrants: Sequence[Entrant], memory: SimMemory, now: datetime) -> Mapping[str, Admission]:
        return schedule(entrants, memory, Priority(), now, timedelta(days=9999))

    life = SimPipeline([*small, big], BUDGET, never, pace, Delays(1, 2, 1)).run()["big"]
    assert life.waited > 250


def test_a_displaced_task_keeps_its_steps_and_leaves_at_the_end_of_one() -> None:
    low = SimTask("low", 0.0, 10, 1000, 80)
    high = SimTask("high", 3.5, 2, 1000, 80, priority=1)
    lives = pipeline([low, high], Priority(), Delays(load=1, checkpoint=2, save=1)).run()
    # low: loads until 1, trains 3 steps until 4, writes until 6. high: loads until 7, trains until 9, saves until 10.
    assert (lives["high"].begun, lives["high"].ended) == (6.0, 10.0)
    # low: let in at 10, loads until 11, trains the other 7 steps, saves.
    assert (lives["low"].preemptions, lives["low"].ended) == (1, 19.0)


def test_namespaces_are_served_by_their_weights() -> None:
    """One place, and more work than it can do: the tokens served are 3 to 1, however the tasks are cut."""
    tasks = [SimTask(f"a{number:03}", 0.0, 8, 1000, 80, namespace="a") for number in range(30)] + [
        SimTask(f"b{number:03}", 1.0, 2, 1000, 80, namespace="b") for number in range(120)
    ]
    served = {"a": 0.0, "b": 0.0}
    history: list[tuple[float, float]] = []

    def fair(entrants: Sequence[Entrant], memory: SimMemory, now: datetime) -> Mapping[str, Admission]:
        for namespace in served:
            lives = [life for life in simulated.lives.values() if life.task.namespace == namespace]
            served[namespace] = sum(int(life.done) * life.task.step_tokens for life in lives)
        history.append((served["a"], served["b"]))
        policy = FairShare(served=dict(served), weights={"a": 3.0})
        return schedule(entrants, memory, policy, now, timedelta(days=9999))

    simulated = SimPipeline(tasks, BUDGET, fair, pace)
    simulated.run()
    half = next((a, b) for a, b in history if a + b >= 200_000)
    assert half[0] / half[1] == pytest.approx(3.0, rel=0.1)
