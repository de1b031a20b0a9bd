"""Groups that do not get all of their workers: who keeps, who gives back, who tries again."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlora_operator.api.pipeline_status import StartSeen
from mlora_operator.reconcile.admission.pipeline_view import view
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.snapshot import Key
from mlora_operator.reconcile.workers.gang import Applicant, GangTurn, Lack, Shortage, applicant, turns
from mlora_operator.scheduling.order import Candidate
from tests.fixtures.stories import stories

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
QUOTA = Shortage(Lack.QUOTA, "exceeded quota: three, requested: pods=1, used: pods=3, limited: pods=3")
ROOM = Shortage(Lack.ROOM, "pod x-1: Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu")
IMAGE = Shortage(Lack.OTHER, "pod x-1: ImagePullBackOff: no such image")


def minutes(number: float) -> datetime:
    return NOW + timedelta(minutes=number)


def ago(number: float) -> str:
    return minutes(-number).strftime("%Y-%m-%dT%H:%M:%SZ")


def group(
    name: str = "a", namespace: str = "team", *, age: float = 60, priority: int = 0, **has: Any
) -> Applicant:
    """A group of two that a task wants, ``age`` minutes old; it has both of its workers unless ``has`` says otherwise."""
    got: dict[str, Any] = {
        "stages": 2,
        "patience": timedelta(minutes=5),
        "first": Candidate(f"uid-{name}", namespace, name, priority, minutes(-age)),
        "asked": 2,
        "pods": 2,
        "workers": 2,
        "placed": 2,
    }
    return Applicant(Key(namespace, name), **{**got, **has})


def half(
    name: str = "a", namespace: str = "team", since: float = 0, lack: Shortage = QUOTA, **has: Any
) -> Applicant:
    """It got one of two workers, ``since`` minutes ago."""
    record = StartSeen(since=ago(since), lack=lack.lack.value, words=lack.words)
    got = {"pods": 1, "workers": 1, "placed": 1, "refusal": lack, "record": record}
    return group(name, namespace, **{**got, **has})


def gave_back(
    name: str = "a",
    namespace: str = "team",
    again: float = 1,
    others: int = 2,
    lack: Shortage = QUOTA,
    **has: Any,
) -> Applicant:
    """It holds nothing and starts again in ``again`` minutes at the latest."""
    record = StartSeen(
        since=ago(9), lack=lack.lack.value, words=lack.words, attempts=1, again=ago(-again), others=others
    )
    return group(
        name, namespace, **{"asked": 0, "pods": 0, "workers": 0, "placed": 0, "record": record, **has}
    )


def word(turn: GangTurn) -> str:
    return (
        "gives back"
        if turn.given_back
        else "yields"
        if turn.yields
        else "gathers"
        if turn.gathers
        else "goes on"
    )


SERVING = group("serving", age=500, ready=2)
STORIES: dict[str, tuple[list[Applicant], dict[str, str]]] = {
    "what has all its workers goes on": ([group(), SERVING], {"a": "goes on"}),
    "half a group is left its time": ([half(since=4.9), SERVING], {"a": "gathers"}),
    "after that it gives back": ([half(since=5), SERVING], {"a": "gives back", "serving": "goes on"}),
    "a group with a time of zero never does": ([half(since=500, patience=timedelta(0))], {"a": "gathers"}),
    "a group that got no pod at all gives back, too, to ask at the right moment": (
        [half(since=5, pods=0, workers=0, placed=0)], {"a": "gives back"}),
    "pods that wait for a node hold nothing, and may make the cluster grow": (
        [half(since=500, lack=ROOM, pods=2, workers=2, placed=0)], {"a": "gathers"}),
    "half a group on full nodes gives back": ([half(since=5, lack=ROOM, pods=2, workers=2)], {"a": "gives back"}),
    "a group whose image cannot be fetched gives its nodes back": (
        [half(since=5, lack=IMAGE, pods=2, workers=2, placed=2)], {"a": "gives back"}),
    "of two halves the younger gives way at once, so that the older gets complete": (
        [half("old", age=60, since=1), half("young", age=50, since=1)], {"old": "gathers", "young": "gives back"}),
    "but not within seconds": (
        [half("old", age=60, since=0.4), half("young", age=50, since=0.4)], {"old": "gathers", "young": "gathers"}),
    "the higher priority is the older demand": (
        [half("old", age=60, since=1), half("high", age=1, priority=5, since=1)], {"old": "gives back", "high": "gathers"}),
    "a quota of another namespace is nobody's concern": (
        [half("old", "team", since=1), half("young", "other", age=50, since=1)], {"old": "gathers", "young": "gathers"}),
    "room on the nodes is everybody's": (
        [half("old", "team", since=1, lack=ROOM), half("young", "other", age=50, since=1, lack=ROOM)],
        {"old": "gathers", "young": "gives back"}),
    "an image that is missing makes nobody give way": (
        [half("old", since=1, lack=IMAGE), half("young", age=50, since=1)], {"old": "gathers", "young": "gathers"}),
    "one that gave back waits while nothing is freed": ([gave_back(), SERVING], {"a": "gives back"}),
    "it starts again when workers of another group have ended": ([gave_back(others=3), SERVING], {"a": "gathers"}),
    "those that are ending still hold the quota": (
        [gave_back(), replace(SERVING, asked=0, pods=2, workers=0, placed=0, ready=0)], {"a": "gives back"}),
    "another namespace's workers free nothing of a quota": (
        [gave_back(others=0), group("b", "other", first=None)], {"a": "gives back"}),
    "it starts again when the pause is over": ([gave_back(again=0), SERVING], {"a": "gathers"}),
    "the younger waits while the older tries": (
        [gave_back("old", others=3), gave_back("young", age=50, others=3), SERVING],
        {"old": "gathers", "young": "gives back"}),
    "and tries when the older has its workers": (
        [group("old", record=StartSeen(lack="Quota", attempts=1)), gave_back("young", age=50, others=3)],
        {"old": "goes on", "young": "gathers"}),
    "what was freed says nothing about an image": ([gave_back(lack=IMAGE, others=9)], {"a": "gives back"}),
    "a group that nobody wants stays warm while nobody lacks anything": (
        [group("idle", first=None, ready=2), group()], {"idle": "goes on"}),
    "it goes at once when another lacks its quota": (
        [group("idle", first=None, ready=2), half(since=0)], {"idle": "yields", "a": "gathers"}),
    "also when that one gave back already": ([group("idle", first=None, ready=2), gave_back()], {"idle": "yields"}),
    "not for the quota of another namespace": (
        [group("idle", "other", first=None, ready=2), half(since=0)], {"idle": "goes on"}),
    "but for room on the nodes": (
        [group("idle", "other", first=None, ready=2), half(since=0, lack=ROOM)], {"idle": "yields"}),
    "and never for an image": ([group("idle", first=None, ready=2), half(since=0, lack=IMAGE)], {"idle": "goes on"}),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_each_group_does_its_part(story: str) -> None:
    groups, expected = STORIES[story]
    for line in (groups, groups[::-1]):
        found = {key.name: word(turn) for key, turn in turns(line, NOW).items()}
        assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("reach", "first"), [({}, "high"), ({"team": 0, "other": 0}, "old"), ({"team": 0, "other": 5}, "high")]
)
def test_a_priority_makes_an_older_demand_as_far_as_it_reaches(reach: dict[str, int], first: str) -> None:
    """On its own pipeline a namespace may set any; the room on the nodes is everybody's."""
    line = [half("old", "team", since=1, lack=ROOM)]
    line += [half("high", "other", age=1, priority=1_000_000, since=1, lack=ROOM)]
    found = {key.name: word(turn) for key, turn in turns(line, NOW, reach.get).items()}
    assert {name for name, told in found.items() if told == "gathers"} == {first}


def test_the_first_of_a_shared_pipeline_is_so_by_what_reaches_all(make: Any) -> None:
    tasks = make.task("old", "team-b", age=90), make.task("high", "team-c", age=1, priority=9)
    seen = view(make.pipeline(), tasks, make.snapshot(*tasks))
    found = [applicant(seen, tasks, reach).first for reach in (lambda _: None, lambda _: 0)]
    assert [one.name for one in found if one is not None] == ["high", "old"]


def test_all_is_forgotten_once_all_workers_are_ready_and_not_before() -> None:
    record = StartSeen(lack="Quota", attempts=3)
    loading = turns([group(record=record)], NOW)[Key("team", "a")]
    assert loading.record == record
    assert turns([group(record=record, ready=2)], NOW)[Key("team", "a")] == GangTurn()


def test_pauses_grow_and_end_at_a_quarter_of_an_hour() -> None:
    pauses = []
    record: StartSeen | None = StartSeen(since=ago(5), lack="Quota")
    for _ in range(7):
        assert record is not None
        turn = turns([half(record=record)], NOW)[Key("team", "a")]
        assert turn.record is not None
        assert turn.given_back
        again = datetime.fromisoformat(str(turn.record.again).replace("Z", "+00:00"))
        pauses.append((again - NOW).total_seconds() / 60)
        record = turn.record.model_copy(update={"again": None, "since": ago(5)})
    assert pauses == [1, 2, 4, 8, 15, 15, 15]


def test_a_clock_that_was_ahead_holds_nobody_up() -> None:
    """Written a day ahead: it would wait for that day, or keep for as long what it cannot use."""
    (turn,) = turns([gave_back(again=24 * 60)], NOW).values()
    assert turn.gathers
    (turn,) = turns([half(since=-24 * 60)], NOW).values()
    assert (turn.gathers, turn.record and turn.record.since) == (True, ago(0))


def test_what_was_held_by_others_at_most_is_remembered() -> None:
    """So that a group that comes and goes while one waits counts as something freed."""
    line = [gave_back(others=0), SERVING]
    seen = turns(line, NOW)[Key("team", "a")].record
    assert seen is not None
    assert seen.others == 2
    assert word(turns([replace(line[0], record=seen)], NOW)[Key("team", "a")]) == "gathers"


def test_what_was_freed_while_an_older_one_tried_is_not_forgotten() -> None:
    line = [gave_back("old", age=60, others=3), gave_back("young", age=50, others=3), SERVING]
    young = turns(line, NOW)[Key("team", "young")]
    assert young.record is not None
    assert (young.given_back, young.record.others) == (True, 3)
    whole = group("old", ready=2, first=None, pods=0, asked=0)
    assert (
        word(turns([replace(line[1], record=young.record), SERVING, whole], NOW)[Key("team", "young")])
        == "gathers"
    )


# --- a world with a quota, in which pods are made in any order ---


class World:
    """Groups in one namespace. Each pass pods are made in a drawn order as long as the quota lasts."""

    def __init__(self, sizes: list[int], quota: int) -> None:
        self.sizes, self.quota = sizes, quota
        self.have = [0] * len(sizes)
        self.asked = list(sizes)
        self.records: list[StartSeen | None] = [None] * len(sizes)
        self.trained = [0.0] * len(sizes)  # minutes since all were there
        self.done = [False] * len(sizes)
        self.refused = [False] * len(sizes)
        self.now = NOW

    def line(self) -> list[Applicant]:
        return [
            replace(
                group(f"g{i}", age=60 - i),
                stages=size,
                asked=self.asked[i],
                pods=self.have[i],
                workers=self.have[i],
                placed=self.have[i],
                ready=self.have[i] if self.trained[i] else 0,
                refusal=QUOTA if self.refused[i] else None,
                record=self.records[i],
            )
            for i, size in enumerate(self.sizes)
            if not self.done[i]
        ]

    def step(self, order: list[int], pass_: float = 0.5) -> None:
        self.now += timedelta(minutes=pass_)
        for key, turn in turns(self.line(), self.now).items():
            i = int(key.name[1:])
            self.records[i] = turn.record
            self.asked[i] = 0 if turn.given_back else self.sizes[i]
            self.have[i] = min(self.have[i], self.asked[i])
        for i in order:
            while not self.done[i] and self.have[i] < self.asked[i] and sum(self.have) < self.quota:
                self.have[i] += 1
                if len(order) > i % 2:  # a controller may make one pod only before another one's turn
                    break
        for i, size in enumerate(self.sizes):
            self.refused[i] = not self.done[i] and self.have[i] < self.asked[i]
            if self.have[i] == size and not self.done[i]:
                self.trained[i] += pass_
                if self.trained[i] >= 8:
                    self.done[i], self.have[i], self.asked[i] = True, 0, 0


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    spare=st.integers(0, 3),
    draw=st.randoms(use_true_random=False),
)
@settings(max_examples=stories(30), deadline=None)
def test_every_group_that_fits_the_quota_alone_trains_in_the_end(
    sizes: list[int], spare: int, draw: Any
) -> None:
    world = World(sizes, max(sizes) + spare)
    order = list(range(len(sizes)))
    for _ in range(600):
        draw.shuffle(order)
        world.step(order)
        if all(world.done):
            break
    assert all(world.done), (world.records, world.have)


def test_two_halves_that_block_each_other_are_solved_in_the_older_ones_favour() -> None:
    world = World([2, 2], quota=2)
    world.have = [1, 1]
    world.refused = [True, True]
    ended = []
    for _ in range(60):
        world.step([0, 1])
        ended.append(tuple(world.done))
    assert (True, False) in ended
    assert (False, True) not in ended
    assert ended[-1] == (True, True)
    assert all(before <= after for before, after in pairwise(ended))


# --- in a decision ---

HALF = {
    "replicas": 2,
    "missing": 1,
    "ready": 0,
    "refusal": Cause("FailedCreate", f"create Pod mlora-toy-1 in StatefulSet mlora-toy failed error: {QUOTA.words}"),
}  # fmt: skip


def held(make: Any, now: datetime, seen: dict[str, Any], group_: dict[str, Any], **task: Any) -> Any:
    snapshot = make.snapshot(
        make.task(**task), pipelines=(make.pipeline(status=seen),), group=make.group(**group_)
    )
    return decide(snapshot, make.settings(), now)


def written(status: Any) -> dict[str, Any]:
    return dict(status.model_dump(mode="json", by_alias=True, exclude_none=True))


def test_half_a_group_is_told_of_and_scaled_to_zero_and_its_task_waits_with_the_quotas_words(
    make: Any,
) -> None:
    toy, t1 = Key("team-a", "toy"), Key("team-a", "t1")
    first = held(make, make.now, {"observedGeneration": 1}, HALF)
    assert first.workers[toy].replicas == 2
    status = written(first.pipeline_statuses[toy])
    later = held(make, make.now + timedelta(minutes=5), status, {**HALF, "starts": 3})
    assert later.workers[toy].replicas == 0
    after = later.pipeline_statuses[toy]
    assert (after.state, after.restarts) == ("Waiting", None)
    ready = next(one for one in after.conditions if one.type == "Ready")
    assert (ready.status, ready.reason) == ("False", "WorkersIncomplete")
    assert QUOTA.words in ready.message
    task = later.task_statuses[t1]
    assert (task.state, task.reason) == ("Queued", "WaitingForWorkers")
    admitted = next(one for one in task.conditions if one.type == "Admitted")
    assert QUOTA.words in admitted.message
    assert {event.reason for event in later.events} >= {"WorkersIncomplete", "WaitingForWorkers"}

    gone = {"replicas": 0}
    status = written(after)
    still = held(make, make.now + timedelta(minutes=5.5), status, gone)
    assert still.workers[toy].replicas == 0
    unchanged = written(still.pipeline_statuses[toy])
    assert {**unchanged, "workersSeen": None} == {**status, "workersSeen": None}
    again = held(make, make.now + timedelta(minutes=6), status, gone)
    assert again.workers[toy].replicas == 2
    assert again.pipeline_statuses[toy].state == "Starting"


@pytest.mark.parametrize(
    "changed", [{"observedGeneration": 0}, {"observedGeneration": 1, "revision": "former"}]
)
def test_a_changed_spec_or_image_starts_again_at_once(make: Any, changed: dict[str, Any]) -> None:
    start = {"attempts": 4, "lack": "Quota", "again": ago(-10), "words": "w"}
    decision = held(make, make.now, {**changed, "start": start}, {"replicas": 0})
    assert decision.workers[Key("team-a", "toy")].replicas == 2
    assert decision.pipeline_statuses[Key("team-a", "toy")].start is None


def test_a_task_that_had_trained_waits_for_the_new_group_as_restarted(make: Any) -> None:
    trained = {"run": "run-1", "step": 7, "conditions": [make.condition("Running", "True", "Training")]}
    start = {"attempts": 1, "lack": "Room", "again": ago(-10), "words": "no node"}
    decision = held(
        make, make.now, {"observedGeneration": 1, "start": start}, {"replicas": 0}, status=trained
    )
    task = decision.task_statuses[Key("team-a", "t1")]
    assert (task.state, task.reason) == ("Queued", "WaitingForWorkers")
    running = next(one for one in task.conditions if one.type == "Running")
    assert (running.status, running.reason) == ("False", "Restarting")
    assert task.step == 7


WORDS = {
    "Insufficient nvidia.com/gpu": Lack.ROOM,
    "0/3 nodes are available: 3 Too many pods": Lack.ROOM,
    "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector": Lack.OTHER,
}


@pytest.mark.parametrize(("words", "lack"), WORDS.items())
def test_what_is_missing_is_read_from_the_schedulers_words(make: Any, words: str, lack: Lack) -> None:
    found = _seen(make, problem=Cause("Unschedulable", words), ready=1)
    assert found.refusal is not None
    assert found.refusal.lack is lack
    assert "mlora-toy-1" in found.refusal.words


def test_a_refusal_that_is_no_quota_is_no_shortage(make: Any) -> None:
    found = _seen(make, refusal=Cause("FailedCreate", "violates PodSecurity"), missing=1)
    assert found.refusal == Shortage(Lack.OTHER, "violates PodSecurity")


@pytest.mark.parametrize("reason", ["CrashLoopBackOff", "SchedulingGated"])
def test_containers_that_ended_and_pods_that_others_hold_back_are_no_refusal(make: Any, reason: str) -> None:
    assert _seen(make, problem=Cause(reason, ""), ready=1).refusal is None


def test_a_group_that_is_scaled_to_zero_is_not_refused(make: Any) -> None:
    assert _seen(make, replicas=0, refusal=Cause("FailedCreate", QUOTA.words)).refusal is None


def _seen(make: Any, **group_: Any) -> Applicant:
    snapshot = make.snapshot(make.task(), group=make.group(**group_))
    return applicant(view(snapshot.pipelines[0], snapshot.tasks, snapshot), snapshot.tasks)


def test_workers_that_end_and_start_again_are_refused_nothing(make: Any) -> None:
    assert _seen(make, refusal=Cause("Restarting", "rank 0 ended with exit code 1"), ready=0).refusal is None
