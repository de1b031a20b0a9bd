"""Groups that fail are counted and in the end left alone; groups that stand still are started anew."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.snapshot import Contact, Key, ProcessEnding

TOY = Key("team-a", "toy")
T1 = Key("team-a", "t1")
CRASH = {
    1: ProcessEnding(1, "exit code 1: RuntimeError: no such device"),
    0: ProcessEnding(75, "exit code 75: the peer left"),
}


class Days:
    """One pipeline with one task, pass after pass: each sees the status that the one before wrote."""

    def __init__(self, make: Any, **spec: Any) -> None:
        self.make = make
        self.spec = spec
        self.now: datetime = make.now
        self.status: dict[str, Any] = {}
        self.task: dict[str, Any] = {}
        self.suspended = False
        self.generation = 1
        self.decision = Decision()

    def look(self, minutes: float = 0.0, contact: Contact | None = None, **group: Any) -> PipelineStatus:
        self.now += timedelta(minutes=minutes)
        made = self.make
        snapshot = made.snapshot(
            made.task(status=self.task, suspend=self.suspended),
            pipelines=(made.pipeline(status=self.status, generation=self.generation, **self.spec),),
            group=made.group(**group),
            contact=contact,
        )
        self.decision = decide(snapshot, made.settings(), self.now)
        status = self.decision.pipeline_statuses[TOY]
        self.status = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.task = self.decision.task_statuses[T1].model_dump(mode="json", by_alias=True, exclude_none=True)
        return status

    def training(self, run: str = "run-1", still: float = 0.0, moved: float | None = 0.0) -> Contact:
        """A task trains; nothing has moved for ``still`` minutes, and progress was last seen ``moved`` minutes ago."""
        report = self.make.report(self.make.reported("Training", step=3), run=run)
        progressed = None if moved is None else self.now - timedelta(minutes=moved)
        return Contact(report=report, progressed=progressed, still_since=self.now - timedelta(minutes=still))

    def replicas(self) -> int | None:
        return self.decision.workers[TOY].replicas if TOY in self.decision.workers else None

    def ready(self) -> tuple[str, str, str]:
        held = next(one for one in self.status["conditions"] if one["type"] == "Ready")
        return self.status["state"], held["status"], held["reason"]

    def stalled(self) -> tuple[str, str] | None:
        return next(
            ((one["status"], one["reason"]) for one in self.status["conditions"] if one["type"] == "Stalled"),
            None,
        )

    def admitted(self) -> dict[str, Any]:
        return next(one for one in self.task["conditions"] if one["type"] == "Admitted")


@pytest.fixture
def days(make: Any) -> Days:
    return Days(make)


# --- what counts as a failure ---


def test_a_rank_that_dies_is_one_failure_however_many_ranks_follow(days: Days) -> None:
    days.look()
    status = days.look(starts=1, ended=CRASH)
    assert (status.restarts, status.last_restart) == (1, "2026-03-01T12:00:00Z")
    assert status.last_failure == "pod mlora-toy-1: exit code 1: RuntimeError: no such device"
    assert days.look(starts=1, ended=CRASH).restarts == 1


def test_what_happened_before_anybody_counted_is_not_counted(days: Days) -> None:
    assert days.look(starts=7).restarts is None
    assert days.look(starts=8).restarts == 1


@pytest.mark.parametrize(
    ("story", "uids", "starts"),
    [
        ("a drained peer: the coordinator's process ends with it", ("pod-0", "other"), 1),
        ("the coordinator's own pod was drained", ("other", "pod-1"), 0),
        ("all were replaced by the operator", ("a", "b"), 0),
    ],
)
def test_a_deleted_pod_restarts_the_group_without_being_a_failure(
    days: Days, story: str, uids: tuple[str, str], starts: int
) -> None:
    days.look()
    assert days.look(uids=uids, starts=starts).restarts is None, story
    assert days.look(uids=uids, starts=starts + 1).restarts == 1, f"{story}; the next one is"


def test_a_peers_pod_that_vanished_before_the_coordinator_noticed_is_no_failure_either(days: Days) -> None:
    days.look()
    days.look(missing=1)
    days.look(uids=("pod-0", "other"))
    assert days.look(minutes=0.5, uids=("pod-0", "other"), starts=1).restarts is None


def test_a_vanished_pod_excuses_one_restart_of_the_coordinator_and_not_two(days: Days) -> None:
    days.look()
    days.look(uids=("pod-0", "other"))
    assert days.look(minutes=0.5, uids=("pod-0", "other"), starts=2).restarts == 1


# --- how often ---


def test_after_too_many_failures_the_workers_go_and_the_tasks_wait_with_the_last_words(make: Any) -> None:
    days = Days(make, restarts={"limit": 2})
    days.look()
    for starts in (1, 2):
        assert days.look(starts=starts, ended=CRASH).restarts == starts
        assert days.replicas() == 2
    status = days.look(starts=3, ended=CRASH)
    assert days.ready() == ("Failed", "False", "RestartLimitReached")
    assert days.replicas() == 0
    message = next(one.message for one in status.conditions if one.type == "Ready")
    assert "failed 3 times" in message
    assert "no such device" in message
    waiting = days.admitted()
    assert (waiting["status"], waiting["reason"]) == ("False", "PipelineFailed")
    assert "team-a/toy" in waiting["message"]
    assert "no such device" in waiting["message"]
    days.look(minutes=600, replicas=0)
    assert days.ready() == ("Failed", "False", "RestartLimitReached")
    assert days.replicas() == 0


def test_an_infrastructure_fault_fails_no_task(make: Any) -> None:
    days = Days(make, restarts={"limit": 0})
    days.look(contact=days.training())
    days.look(starts=1, ended=CRASH)
    assert days.task["state"] == "Pending"
    assert not [one for one in days.task["conditions"] if one["type"] == "Failed"]


@pytest.mark.parametrize(
    "act",
    ["a changed spec", "suspended tasks", "another image", "another image, with a former operator's status"],
)
def test_a_group_that_was_given_up_is_tried_again_once_someone_acts(make: Any, act: str) -> None:
    days = Days(make, restarts={"limit": 0})
    days.look()
    days.look(starts=1, ended=CRASH)
    assert days.replicas() == 0
    group = {}
    if act == "a changed spec":
        days.generation = 2
    elif act == "another image":
        days.status["revision"] = "of the image before"
    elif act.startswith("another image,"):
        del days.status["revision"]
        group = {"revision": "of the image before"}
    else:
        days.suspended = True
        days.look(replicas=0)
        days.suspended = False
    status = days.look(replicas=0, **group)
    assert (days.replicas(), status.restarts, status.state) == (2, None, "Starting")
    assert days.look(replicas=2, ready=0).restarts is None


def test_a_group_that_was_given_up_stays_so_under_the_same_configuration(make: Any) -> None:
    days = Days(make, restarts={"limit": 0})
    days.look()
    days.look(starts=1, ended=CRASH)
    assert days.look(replicas=0, minutes=600).given_up == "RestartLimitReached"
    del days.status["revision"]
    assert days.look(replicas=0).given_up == "RestartLimitReached"


@pytest.mark.parametrize(
    ("story", "since", "moved", "restarts"),
    [
        ("progress for long enough", 11, 0.0, None),
        ("not long enough", 9, 0.0, 1),
        ("long ago, and nothing moves since", 11, 8.0, 1),
        ("nothing has moved at all", 11, None, 1),
    ],
)
def test_lasting_progress_sets_the_count_back(
    days: Days, story: str, since: float, moved: float | None, restarts: int | None
) -> None:
    days.look()
    days.look(starts=1, ended=CRASH)
    days.now += timedelta(minutes=since)
    assert days.look(starts=1, contact=days.training("run-2", moved=moved)).restarts == restarts, story


def test_a_clock_that_was_ahead_at_the_failure_does_not_keep_the_count(days: Days) -> None:
    days.look()
    days.look(minutes=24 * 60, starts=1, ended=CRASH)
    days.now -= timedelta(days=1)
    assert days.look(starts=1, contact=days.training("run-2")).last_restart == "2026-03-01T12:00:00Z"
    days.now += timedelta(minutes=11)
    assert days.look(starts=1, contact=days.training("run-2")).restarts is None


def test_workers_that_cannot_serve_the_model_are_not_tried_again(days: Days) -> None:
    ended = {
        1: ProcessEnding(75, "exit code 75"),
        0: ProcessEnding(2, "exit code 2: 4 stages for 3 decoder layers"),
    }
    days.look()
    days.look(starts=1, ended=ended)
    assert days.ready() == ("Failed", "False", "CannotServe")
    assert days.replicas() == 0
    days.look(minutes=1, replicas=0)
    assert days.ready() == ("Failed", "False", "CannotServe")
    assert "4 stages for 3 decoder layers" in days.admitted()["message"]


def test_the_words_shown_are_those_of_the_worker_that_knows_why(days: Days) -> None:
    days.look()
    refusal = ProcessEnding(2, "exit code 2: the model has 1 layer, and spec.stages is 2")
    ended = {0: ProcessEnding(1, "exit code 1: connection reset"), 1: refusal}
    status = days.look(starts=1, ready=0, ended=ended)
    assert status.last_failure == f"pod mlora-toy-1: {refusal.words}"


def test_words_of_a_former_configuration_are_nobodys(days: Days) -> None:
    ended = {0: ProcessEnding(2, "exit code 2: 4 stages for 3 decoder layers")}
    days.look()
    days.look(ended=ended, pod_revision="old")
    assert days.ready()[0] == "Starting"


# --- a group that stands still ---


def test_tasks_that_train_without_moving_get_a_new_group(days: Days) -> None:
    days.look(contact=days.training())
    days.look(contact=days.training(still=9.9))
    assert not days.decision.delete_pods
    assert days.stalled() is None
    status = days.look(contact=days.training(still=10))
    assert [pod.key.name for pod in days.decision.delete_pods] == ["mlora-toy-0", "mlora-toy-1"]
    assert days.stalled() == ("True", "NoProgress")
    assert days.ready() == ("Stalled", "False", "NoProgress"), "`Ready` would hide it"
    assert status.restarts == 1
    assert "10m" in (status.last_failure or "")
    assert ("Warning", "NoProgress") in [(one.type, one.reason) for one in days.decision.events]


def test_a_stall_is_counted_once_though_the_pods_take_their_time(days: Days) -> None:
    days.look(contact=days.training())
    for minutes in (10, 11):
        assert days.look(contact=days.training(still=minutes)).restarts == 1
        assert len(days.decision.delete_pods) == 2
    away = Contact(lost_since=days.now, error="refused")
    days.look(ready=0, uids=("a", "b"), contact=away)
    assert days.stalled() == ("True", "NoProgress")
    status = days.look(uids=("a", "b"), contact=days.training("run-2"))
    assert days.stalled() == ("False", "Restarted")
    assert status.restarts == 1
    days.look(uids=("a", "b"), contact=days.training("run-2", still=10))
    assert days.status["restarts"] == 2


def test_a_group_that_stalls_again_and_again_is_given_up(make: Any) -> None:
    days = Days(make, restarts={"limit": 1})
    days.look(contact=days.training())
    days.look(contact=days.training(still=10, moved=None))
    days.look(uids=("a", "b"), contact=days.training("run-2", moved=None))
    days.look(uids=("a", "b"), contact=days.training("run-2", still=10, moved=None))
    assert days.ready() == ("Failed", "False", "RestartLimitReached")
    assert not days.decision.delete_pods  # scaled to zero, they go by themselves
    assert days.replicas() == 0


def test_a_pipeline_may_say_how_long_is_too_long(make: Any) -> None:
    quick, never = Days(make, stallTimeout="90s"), Days(make, stallTimeout="0s")
    for days in (quick, never):
        days.look(contact=days.training())
        days.look(contact=days.training(still=2))
    assert quick.stalled() == ("True", "NoProgress")
    assert never.stalled() is None


@pytest.mark.parametrize(
    ("story", "lost", "ready_for", "starting", "ready", "stalled"),
    [
        ("silent for long", 10, 30, False, 2, True),
        ("not that long", 9, 30, False, 2, False),
        ("the workers have just become ready", 30, 1, False, 2, False),
        ("it loads the model", 30, 30, True, 2, False),
        ("a worker is not ready: the kubelet sees to it", 30, 30, False, 1, False),
    ],
)
def test_a_coordinator_that_does_not_answer_though_its_pod_is_ready(
    days: Days, story: str, lost: float, ready_for: float, starting: bool, ready: int, stalled: bool
) -> None:
    days.look(contact=days.training())
    contact = Contact(
        lost_since=days.now - timedelta(minutes=lost), error="no answer within 5 s", starting=starting
    )
    group = days.make.group
    since = days.now - timedelta(minutes=ready_for)
    days.make.group = lambda **fields: group(**fields, ready_since=since)
    days.look(ready=ready, contact=contact)
    assert (days.stalled() == ("True", "CoordinatorNotResponding")) is stalled, story
    assert bool(days.decision.delete_pods) is stalled, story


def test_an_idle_group_does_not_stall(days: Days) -> None:
    days.suspended = True
    silent = Contact(lost_since=days.now - timedelta(hours=1), error="refused")
    days.look(contact=silent)
    assert days.stalled() is None
    assert not days.decision.delete_pods


@pytest.mark.parametrize(("seconds", "stalled"), [(20, False), (30, True)])
def test_silence_of_a_moment_is_none_however_short_the_patience(
    make: Any, seconds: float, stalled: bool
) -> None:
    days = Days(make, stallTimeout="2s")
    days.look(contact=days.training())
    days.look(
        contact=Contact(lost_since=days.now - timedelta(seconds=seconds), error="no answer"),
        ready_since=days.now - timedelta(hours=1),
    )
    assert (days.stalled() is not None) is stalled
