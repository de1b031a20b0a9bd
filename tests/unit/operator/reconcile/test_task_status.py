"""What a user reads on a task, for everything that can have become of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.admission.pipeline_view import view
from mlora_operator.reconcile.admission.workload import candidate
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.snapshot import Contact, Key
from mlora_operator.reconcile.status.admission_message import admission_message
from mlora_operator.reconcile.status.pipeline_summary import pipeline_context
from mlora_operator.reconcile.status.task import task_status
from mlora_operator.reconcile.workers.gang import GangTurn
from mlora_operator.reconcile.workers.health import GroupHealth
from mlora_operator.scheduling.admission import Admission, AdmissionOutcome, LazyMemoryCheck, MemoryCheck
from mlora_worker.protocol import AdapterInfo, DataCounts, Failure, FailureReason

T1 = Key("team-a", "t1")


def status_of(
    make: Any, *, now: Any = None, task: dict[str, Any] | None = None, **snapshot: Any
) -> TaskStatus:
    """The status of task t1 after one pass."""
    raw = make.task(**(task or {}))
    return decide(make.snapshot(raw, **snapshot), make.settings(), now or make.now).task_statuses[T1]


def said(status: TaskStatus) -> dict[str, str]:
    """type -> status/reason"""
    return {one.type: f"{one.status}/{one.reason}" for one in status.conditions}


def message(status: TaskStatus, type_: str) -> str:
    return next(one.message for one in status.conditions if one.type == type_)


def lived(make: Any, *conditions: tuple[str, str, str], **fields: Any) -> dict[str, Any]:
    """A task with a past."""
    past = {"pipeline": "team-a/toy", "conditions": [make.condition(*one) for one in conditions], **fields}
    return {"status": past}


TRAINED = (
    ("Accepted", "True", "Accepted"),
    ("Admitted", "True", "Admitted"),
    ("Running", "True", "Training"),
)


@pytest.mark.parametrize(
    ("phase", "state", "expected"),
    [
        ("Preparing", "Preparing", {"Admitted": "False/PreparingData"}),
        ("Prepared", "Queued", {"Admitted": "True/Admitted"}),
        ("Training", "Training", {"Admitted": "True/Admitted", "Running": "True/Training"}),
        ("Saving", "Saving", {"Admitted": "True/Admitted", "Running": "True/Saving"}),
        (
            "Succeeded",
            "Succeeded",
            {
                "Admitted": "False/Finished",
                "Running": "False/Finished",
                "Succeeded": "True/AdapterUploaded",
                "Failed": "False/AdapterUploaded",
                "Finished": "True/Succeeded",
            },
        ),
        (
            "Failed",
            "Failed",
            {
                "Admitted": "False/Finished",
                "Running": "False/Finished",
                "Succeeded": "False/InvalidRow",
                "Failed": "True/InvalidRow",
                "Finished": "True/Failed",
            },
        ),
    ],
)
def test_phases_of_the_worker_become_conditions(
    make: Any, phase: str, state: str, expected: dict[str, str]
) -> None:
    status = status_of(make, group=make.group(), contact=Contact(report=make.report(make.reported(phase))))
    assert status.state == state
    assert said(status) == {"Accepted": "True/Accepted", **expected}
    assert all(one.observed_generation == 1 for one in status.conditions)


def test_progress_is_copied_as_text_that_is_always_valid_json(make: Any) -> None:
    training = make.reported("Training", step=12, loss=1.23456789, tokens_per_second=812.34)
    status = status_of(make, group=make.group(), contact=Contact(report=make.report(training)))
    assert (status.step, status.total_steps, status.progress) == (12, 50, "12/50")
    assert (status.loss, status.tokens_per_second) == ("1.2346", "812")
    assert status.start_time == "2026-03-01T12:00:00Z"
    assert status.completion_time is None


@pytest.mark.parametrize(
    ("phase", "step", "tokens", "speed", "eta"),
    [
        ("Training", 12, 900, 10.0, "28m"),  # 38 steps, 450 tokens each: 9 rows are two steps of at most 8
        ("Training", 50, 900, 10.0, "0s"),
        ("Training", 12, 0, 10.0, None),
        ("Training", 12, 900, None, None),
        ("Training", 12, 900, 1e-310, None),
        ("Saving", 50, 900, 10.0, None),
    ],
)
def test_a_task_that_trains_says_for_how_long(
    make: Any, phase: str, step: int, tokens: int, speed: float | None, eta: str | None
) -> None:
    data = DataCounts(rows=9, used=9, tokens=tokens)
    told = make.reported(phase, step=step, tokens_per_second=speed, data=data)
    before = {"status": {"eta": "1h", "pipeline": "team-a/toy"}}
    status = status_of(make, task=before, group=make.group(), contact=Contact(report=make.report(told)))
    assert status.eta == eta


def test_a_success_has_adapter_counts_and_time(make: Any) -> None:
    done = make.reported("Succeeded", step=50)
    past = lived(make, *TRAINED, startTime="2026-03-01T11:00:00Z", run="run-1")
    status = status_of(make, task=past, group=make.group(), contact=Contact(report=make.report(done)))
    assert status.adapter is not None
    assert status.adapter.uri == "s3://adapters/t1"
    assert status.data is not None
    assert status.data.used == 9
    assert (status.start_time, status.completion_time) == ("2026-03-01T11:00:00Z", "2026-03-01T12:00:00Z")


def test_an_adapter_lies_where_the_task_says_whatever_a_worker_says(make: Any) -> None:
    """A worker that was taken over must not lead a task's users to another's adapter."""
    elsewhere = AdapterInfo(uri="s3://adapters/of-another", sha256="cd" * 32, bytes=1)
    done = make.reported("Succeeded", step=50, adapter=elsewhere)
    status = status_of(make, group=make.group(), contact=Contact(report=make.report(done)))
    assert status.adapter is not None
    assert status.adapter.uri == "s3://adapters/t1"
    assert message(status, "Succeeded") == "the adapter was verified and uploaded to s3://adapters/t1"


def test_a_failure_says_what_the_worker_said(make: Any) -> None:
    status = status_of(make, group=make.group(), contact=Contact(report=make.report(make.reported("Failed"))))
    told = message(status, "Failed")
    assert told.startswith("line 7: no completion; ")
    assert "mlora.dev/retry" in told, "the rows can be mended where they are, and the task be tried again"
    assert message(status, "Finished") == f"InvalidRow: {told}"
    assert status.completion_time is not None


def test_a_failure_that_only_another_spec_mends_says_nothing_of_another_try(make: Any) -> None:
    failure = Failure(reason=FailureReason.UNKNOWN_TARGET_MODULE, message="no module q")
    reported = make.reported("Failed").model_copy(update={"failure": failure})
    status = status_of(make, group=make.group(), contact=Contact(report=make.report(reported)))
    assert message(status, "Failed") == "no module q"


IMAGE = Cause("ImagePullBackOff", 'Back-off pulling image "worker:typo"')


@pytest.mark.parametrize(
    ("story", "fields", "words"),
    [
        ("no workers yet", {}, "0 of 2 workers"),
        ("one of two", {"group": {"ready": 1}}, "1 of 2 workers"),
        (
            "a pod cannot start",
            {"group": {"ready": 1, "problem": IMAGE}},
            "mlora-toy-1: ImagePullBackOff: Back-off",
        ),
        (
            "a quota keeps pods away",
            {
                "group": {
                    "ready": 0,
                    "missing": 2,
                    "refusal": Cause("FailedCreate", "exceeded quota: gpus"),
                }
            },
            "exceeded quota",
        ),
        ("the coordinator is not up", {"group": {}, "contact": Contact()}, "does not respond yet"),
        ("the model is being loaded", {"group": {}, "contact": Contact(starting=True)}, "load the model"),
    ],
)
def test_a_task_that_waits_for_workers_says_what_they_wait_for(
    make: Any, story: str, fields: dict[str, Any], words: str
) -> None:
    group = make.group(**fields["group"]) if "group" in fields else None
    status = status_of(make, group=group, contact=fields.get("contact"))
    assert (status.state, status.reason) == ("Pending", "PipelineStarting"), story
    assert words in message(status, "Admitted")


def test_a_task_too_large_for_the_memory_is_told_so_at_once_and_never_runs(make: Any) -> None:
    contact = Contact(report=make.report(make.reported("Preparing"), capacity=10_000_000))
    status = status_of(make, group=make.group(), contact=contact)
    assert (status.state, said(status)["Admitted"]) == ("Rejected", "False/ExceedsCapacity")
    assert "maxSeqLength" in message(status, "Admitted")


@pytest.mark.parametrize("phase", ["Prepared", "Training"])
def test_a_suspended_task_gives_its_place_back(make: Any, phase: str) -> None:
    task = {"suspend": True, **lived(make, *TRAINED, run="run-1")}
    contact = Contact(report=make.report(make.reported(phase)))
    status = status_of(make, task=task, group=make.group(), contact=contact)
    assert status.state == "Suspended"
    assert said(status)["Admitted"] == said(status)["Running"] == "False/Suspended"
    assert status.run is None


def test_a_suspended_task_that_has_just_succeeded_has_succeeded(make: Any) -> None:
    contact = Contact(report=make.report(make.reported("Succeeded")))
    assert status_of(make, task={"suspend": True}, group=make.group(), contact=contact).state == "Succeeded"


# --- restarts of the workers ---


@pytest.mark.parametrize("reported", [None, "Preparing", "Prepared"])
def test_a_new_run_of_the_workers_is_a_restart(make: Any, reported: str | None) -> None:
    tasks = [make.reported(reported)] if reported else []
    contact = Contact(report=make.report(*tasks, run="run-2"))
    past = lived(make, *TRAINED, run="run-1", restarts=1)
    status = status_of(make, task=past, group=make.group(), contact=contact)
    assert said(status)["Running"] == "False/Restarting"
    assert status.restarts == 2
    assert status.run is None


def test_a_restart_is_counted_once_and_shown_until_the_task_runs_again(make: Any) -> None:
    past = lived(make, ("Accepted", "True", "Accepted"), ("Running", "False", "Restarting"), restarts=1)
    preparing = Contact(report=make.report(make.reported("Preparing"), run="run-2"))
    waiting = status_of(make, task=past, group=make.group(), contact=preparing)
    assert (said(waiting)["Running"], waiting.restarts) == ("False/Restarting", 1)
    training = Contact(report=make.report(make.reported("Training"), run="run-2"))
    again = status_of(make, task=past, group=make.group(), contact=training)
    assert (said(again)["Running"], again.restarts, again.run) == ("True/Training", 1, "run-2")


def test_a_restart_that_nobody_saw_is_counted_too(make: Any) -> None:
    past = lived(make, *TRAINED, run="run-1")
    contact = Contact(report=make.report(make.reported("Training"), run="run-2"))
    status = status_of(make, task=past, group=make.group(), contact=contact)
    assert (said(status)["Running"], status.restarts, status.run) == ("True/Training", 1, "run-2")


def test_a_task_that_never_ran_is_not_restarted(make: Any) -> None:
    past = lived(make, ("Accepted", "True", "Accepted"), ("Admitted", "False", "PreparingData"))
    contact = Contact(report=make.report(make.reported("Preparing"), run="run-2"))
    status = status_of(make, task=past, group=make.group(), contact=contact)
    assert status.restarts is None
    assert "Running" not in said(status)


def test_a_success_found_after_a_restart_is_no_restart(make: Any) -> None:
    past = lived(make, *TRAINED, run="run-1")
    contact = Contact(report=make.report(make.reported("Succeeded"), run="run-2"))
    status = status_of(make, task=past, group=make.group(), contact=contact)
    assert (status.state, status.restarts) == ("Succeeded", None)


# --- displaced by a task that goes first ---


def displaced(
    make: Any,
    phase: str,
    task: dict[str, Any] | None = None,
    outcome: AdmissionOutcome = AdmissionOutcome.WAITING,
    by: str | None = None,
    lazy_check: LazyMemoryCheck | None = None,
    **fields: Any,
) -> TaskStatus:
    """The status of t1 when the scheduler has said so of it."""
    raw = make.task(**(task or {}))
    contact = Contact(report=make.report(make.reported(phase, step=7, **fields)))
    seen = view(make.pipeline(), (raw,), make.snapshot(raw, group=make.group(), contact=contact))
    behind = candidate(make.task("older")) if lazy_check is None else None
    place = Admission(outcome, lazy_check=lazy_check, behind=behind)
    if by is not None:
        place = place._replace(displaced_by=candidate(make.task(by, priority=10)))
    return task_status(
        raw,
        Cause("Accepted", ""),
        pipeline_context(seen, GroupHealth(), GangTurn(), make.now),
        admission_message(raw, place, words_stay=False),
        seen.reported(raw),
        None,
        make.now,
    )


def kept(status: TaskStatus) -> dict[str, Any]:
    return {"status": status.model_dump(mode="json", by_alias=True, exclude_none=True)}


def test_a_task_that_waits_for_memory_says_for_how_much(make: Any) -> None:
    class TooMuch:
        def check(self) -> MemoryCheck:
            return MemoryCheck(fits=False, stage=1, needed=3 * 2**20, budget=2 * 2**20)

    status = displaced(make, "Prepared", lazy_check=TooMuch())
    assert (status.state, said(status)["Admitted"]) == ("Queued", "False/WaitingForMemory")
    assert "3.00 MiB on stage 1" in message(status, "Admitted")
    assert "2.00 MiB" in message(status, "Admitted")


def test_a_displaced_task_says_for_whom_it_leaves_and_keeps_the_words_until_it_runs_again(make: Any) -> None:
    past = lived(make, *TRAINED, run="run-1")
    leaving = displaced(make, "Training", past, AdmissionOutcome.PREEMPTED, by="urgent")
    assert said(leaving)["Preempted"] == "True/Preempted"
    assert said(leaving)["Running"] == "True/Training"  # to the end of its step
    assert said(leaving)["Admitted"] == "False/Preempted"
    assert "urgent" in message(leaving, "Preempted")
    assert leaving.preemptions == 1
    later = displaced(
        make, "Training", kept(leaving), AdmissionOutcome.PREEMPTED
    )  # the scheduler has forgotten for whom
    assert later == leaving

    out = displaced(make, "Preempted", kept(leaving), checkpoint_step=7)
    assert (out.state, out.reason, out.preemptions) == ("Preempted", "Preempted", 1)
    assert said(out)["Running"] == "False/WaitingForMemory"
    assert message(out, "Preempted") == message(leaving, "Preempted")
    assert (out.step, out.checkpoint_step, out.run) == (7, 7, None)

    again = make.reported("Training", step=7, resumed_step=7, checkpoint_step=7)
    contact = Contact(report=make.report(again))
    back = status_of(make, task=kept(out), group=make.group(), contact=contact)
    assert said(back)["Preempted"] == "False/Resumed"
    assert (back.state, back.resumed_step, back.preemptions, back.restarts) == ("Training", 7, 1, None)


def test_a_preemption_whose_decision_was_lost_with_an_operator_is_told_all_the_same(make: Any) -> None:
    status = displaced(make, "Preempted", lived(make, *TRAINED, run="run-1"))
    assert said(status)["Preempted"] == "True/Preempted"
    assert (status.state, status.preemptions) == ("Preempted", 1)


def test_a_suspended_task_was_not_preempted_by_anybody(make: Any) -> None:
    task = {"suspend": True, **lived(make, *TRAINED, run="run-1")}
    contact = Contact(report=make.report(make.reported("Preempted", step=7, checkpoint_step=7)))
    status = status_of(make, task=task, group=make.group(), contact=contact)
    assert (status.state, status.checkpoint_step) == ("Suspended", 7)
    assert "Preempted" not in said(status)
    resumed = displaced(make, "Preempted", kept(status))
    assert "Preempted" not in said(resumed)
    assert resumed.preemptions is None


def test_a_task_that_saves_is_not_suspended_any_more(make: Any) -> None:
    task = {"suspend": True, **lived(make, *TRAINED, run="run-1")}
    contact = Contact(report=make.report(make.reported("Saving", step=50)))
    assert status_of(make, task=task, group=make.group(), contact=contact).state == "Saving"


def test_a_group_that_ends_while_a_task_is_out_does_not_restart_that_task(make: Any) -> None:
    past = lived(make, *TRAINED[:1], ("Preempted", "True", "Preempted"), preemptions=1)
    contact = Contact(report=make.report(make.reported("Prepared"), run="run-2"))
    status = status_of(make, task=past, group=make.group(), contact=contact)
    assert (status.restarts, status.preemptions) == (None, 1)
    assert said(status)["Preempted"] == "True/Preempted"


def test_a_displaced_task_that_ends_is_not_displaced_any_more(make: Any) -> None:
    past = lived(make, *TRAINED, ("Preempted", "True", "Preempted"), run="run-1")
    contact = Contact(report=make.report(make.reported("Succeeded", step=50)))
    status = status_of(make, task=past, group=make.group(), contact=contact)
    assert said(status)["Preempted"] == "False/Finished"


# --- an upload that the store refuses ---


def blocked(phase: str = "Saving", **fields: Any) -> dict[str, Any]:
    refusal = Failure(reason=FailureReason.ACCESS_DENIED, message="403 for s3://adapters/t1: ExpiredToken")
    return {"phase": phase, "blocked": refusal, "step": 50, **fields}


def test_a_refused_upload_is_shown_with_the_stores_words_until_it_goes_on(make: Any) -> None:
    contact = Contact(report=make.report(make.reported(**blocked())))
    status = status_of(make, task=lived(make, *TRAINED, run="run-1"), group=make.group(), contact=contact)
    assert (status.state, status.reason) == ("UploadBlocked", "AccessDenied")
    assert said(status)["UploadBlocked"] == "True/AccessDenied"
    assert "ExpiredToken" in message(status, "UploadBlocked")
    assert said(status)["Running"] == "True/Saving"

    away = Contact(report=contact.report, lost_since=make.now, error="refused")
    unseen = status_of(make, task=kept(status), group=make.group(), contact=away)
    assert said(unseen)["UploadBlocked"] == "True/AccessDenied"

    for phase, state in (("Saving", "Saving"), ("Succeeded", "Succeeded")):
        contact = Contact(report=make.report(make.reported(phase, step=50)))
        after = status_of(make, task=kept(status), group=make.group(), contact=contact)
        assert (after.state, said(after)["UploadBlocked"]) == (state, "False/UploadResumed")


def test_a_task_that_trains_on_while_its_checkpoint_is_refused_is_training(make: Any) -> None:
    contact = Contact(report=make.report(make.reported(**blocked("Training"))))
    status = status_of(make, task=lived(make, *TRAINED, run="run-1"), group=make.group(), contact=contact)
    assert (status.state, said(status)["UploadBlocked"]) == ("Training", "True/AccessDenied")


def test_an_upload_that_failed_in_the_end_does_not_go_on(make: Any) -> None:
    past = lived(make, *TRAINED, ("UploadBlocked", "True", "AccessDenied"), run="run-1")
    contact = Contact(report=make.report(make.reported("Failed", step=50)))
    status = status_of(make, task=past, group=make.group(), contact=contact)
    assert said(status)["UploadBlocked"] == "False/Finished"


# --- progress over a restart ---


def test_progress_stays_until_a_restarted_worker_speaks(make: Any) -> None:
    numbers = {"step": 12, "totalSteps": 50, "progress": "12/50", "loss": "1.5000", "checkpointStep": 10}
    past = lived(make, *TRAINED, run="run-1", **numbers)
    for phase in ("Preparing", "Prepared", "Training"):
        contact = Contact(report=make.report(make.reported(phase), run="run-2"))
        status = status_of(make, task=past, group=make.group(), contact=contact)
        assert (status.step, status.progress, status.loss) == (12, "12/50", "1.5000"), phase
        assert status.checkpoint_step == 10
    spoken = make.reported("Training", step=10, resumed_step=10, checkpoint_step=10)
    contact = Contact(report=make.report(spoken, run="run-2"))
    status = status_of(make, task=past, group=make.group(), contact=contact)
    assert (status.step, status.progress, status.resumed_step) == (10, "10/50", 10)
    assert status.restarts == 1


def test_a_task_that_had_to_begin_anew_says_so(make: Any) -> None:
    past = lived(make, *TRAINED, run="run-1", step=12, resumedStep=8)
    contact = Contact(report=make.report(make.reported("Training", step=1), run="run-2"))
    status = status_of(make, task=past, group=make.group(), contact=contact)
    assert (status.step, status.resumed_step) == (1, None)


# --- a coordinator that does not answer ---


@pytest.mark.parametrize(
    ("seconds", "running"), [(1, "True/Training"), (20, "Unknown/CoordinatorUnreachable")]
)
def test_a_silent_coordinator_is_spoken_of_after_a_while(make: Any, seconds: int, running: str) -> None:
    lost = Contact(
        report=make.report(make.reported("Training")),
        lost_since=make.now - timedelta(seconds=seconds),
        error="no answer within 5 s",
    )
    past = lived(make, *TRAINED, run="run-1", state="Training")
    status = status_of(make, task=past, group=make.group(), contact=lost)
    assert said(status)["Running"] == running
    assert (status.state, status.run) == ("Training", "run-1")


def test_a_restarted_operator_changes_nothing_before_the_first_report(make: Any) -> None:
    past = lived(make, *TRAINED, run="run-1", state="Training", observedGeneration=1)
    task = make.task(**past)
    decision = decide(make.snapshot(task, group=make.group(), contact=Contact()), make.settings(), make.now)
    assert said(decision.task_statuses[T1]) == said(task.status)
    assert decision.plans == {}


def test_workers_that_load_the_model_anew_have_forgotten_the_task(make: Any) -> None:
    contact = Contact(lost_since=make.now, error="loading", starting=True)
    status = status_of(make, task=lived(make, *TRAINED, run="run-1"), group=make.group(), contact=contact)
    assert said(status)["Running"] == "False/Restarting"
    assert status.run == "run-1"  # counted when the new run reports


# --- not accepted ---


def test_a_wrong_spec_names_the_field(make: Any) -> None:
    status = status_of(make, task={"lora": {"rank": 0}})
    assert (status.state, said(status)) == ("Rejected", {"Accepted": "False/InvalidSpec"})
    assert "spec.lora.rank" in message(status, "Accepted")


def test_a_task_that_loses_its_pipeline_loses_its_place(make: Any) -> None:
    status = status_of(make, task=lived(make, *TRAINED, run="run-1"), pipelines=())
    assert set(said(status).values()) == {"False/NoPipelineForModel"}
    assert (status.pipeline, status.run) == (None, None)


def test_a_late_secret_is_all_it_takes(make: Any) -> None:
    task = {"storage": {"secretRef": {"name": "keys"}}}
    key = Key("team-a", "keys")
    assert status_of(make, task=task, secrets={key: None}).reason == "SecretNotFound"
    data = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    assert said(status_of(make, task=task, secrets={key: data}))["Accepted"] == "True/Accepted"


def test_a_condition_keeps_its_time_until_its_status_changes(make: Any) -> None:
    earlier = make.now - timedelta(hours=1)
    past = {
        "status": {
            "pipeline": "team-a/toy",
            "conditions": [
                make.condition("Accepted", "True", "Accepted", earlier),
                make.condition("Admitted", "False", "PipelineStarting", earlier),
                make.condition("Running", "False", "Restarting", earlier),
            ],
        }
    }
    contact = Contact(report=make.report(make.reported("Training")))
    status = status_of(make, task=past, group=make.group(), contact=contact)
    times = {one.type: one.last_transition_time for one in status.conditions}
    assert times == {
        "Accepted": "2026-03-01T11:00:00Z",
        "Admitted": "2026-03-01T12:00:00Z",
        "Running": "2026-03-01T12:00:00Z",
    }


@pytest.mark.parametrize("type_", ["Succeeded", "Failed"])
def test_a_finished_task_is_never_touched_again(make: Any, type_: str) -> None:
    task = make.task(status={"conditions": [make.condition(type_, "True")], "pipeline": "team-a/toy"})
    contact = Contact(report=make.report(make.reported("Training")))
    decision = decide(make.snapshot(task, group=make.group(), contact=contact), make.settings(), make.now)
    assert decision.task_statuses == {}
    assert decision.plans[Key("team-a", "toy")].tasks == ()
    assert [event.kind for event in decision.events] == ["LoRAPipeline"]
