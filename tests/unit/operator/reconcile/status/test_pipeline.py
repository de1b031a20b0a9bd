"""Workers come when a task wants them, go when none does, and are replaced when nobody uses them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from mlora_operator.api import conditions as c
from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.snapshot import Contact, Key, condition
from mlora_worker.protocol import WireReport

TOY = Key("team-a", "toy")
RUNNING = [("Accepted", "True"), ("Admitted", "True"), ("Running", "True")]


def decision(make: Any, *tasks: Any, now: Any = None, settings: Any = None, **snapshot: Any) -> Decision:
    return decide(make.snapshot(*tasks, **snapshot), settings or make.settings(), now or make.now)


def replicas(made: Decision) -> int | None:
    return made.workers[TOY].replicas if TOY in made.workers else None


def ready(status: PipelineStatus) -> tuple[str, str]:
    held = next(one for one in status.conditions if one.type == "Ready")
    return held.status, held.reason


# --- how many ---


def test_no_task_no_workers(make: Any) -> None:
    made = decision(make)
    assert replicas(made) is None
    assert made.pipeline_statuses[TOY].state == "Idle"


def test_a_task_starts_all_stages_at_once(make: Any) -> None:
    assert replicas(decision(make, make.task())) == 2


@pytest.mark.parametrize(
    ("story", "task"),
    [
        ("suspended", {"suspend": True}),
        ("invalid", {"lora": {"rank": 0}}),
        ("without its Secret", {"storage": {"secretRef": {"name": "keys"}}}),
        ("for another model", {"baseModel": "Org/Other"}),
    ],
)
def test_a_task_that_cannot_train_starts_nothing(make: Any, story: str, task: dict[str, Any]) -> None:
    assert replicas(decision(make, make.task(**task))) is None, story


def test_a_finished_task_starts_nothing_not_even_for_a_new_operator(make: Any) -> None:
    done = make.task(status={"conditions": [make.condition("Succeeded", "True")]})
    assert replicas(decision(make, done)) is None


def test_a_task_that_can_never_fit_does_not_hold_the_workers(make: Any) -> None:
    known = {
        "observedGeneration": 1,
        "facts": make.facts().model_dump(by_alias=True),
        "stages": [one.model_dump(by_alias=True) for one in make.stages(capacity=10_000_000)],
    }
    made = decision(make, make.task(), pipelines=(make.pipeline(status=known),))
    assert replicas(made) is None
    assert made.task_statuses[Key("team-a", "t1")].reason == "ExceedsCapacity"


@pytest.mark.parametrize(
    ("story", "since", "expected"),
    [
        ("just now: the clock starts", None, 2),
        ("not long enough", timedelta(minutes=9, seconds=59), 2),
        ("long enough", timedelta(minutes=10), 0),
    ],
)
def test_idle_workers_go_after_the_timeout(
    make: Any, story: str, since: timedelta | None, expected: int
) -> None:
    status = {"idleSince": (make.now - since).strftime("%Y-%m-%dT%H:%M:%SZ")} if since else {}
    made = decision(make, pipelines=(make.pipeline(status=status, idleTimeout="10m"),), group=make.group())
    assert replicas(made) == expected, story
    assert made.pipeline_statuses[TOY].idle_since == (status.get("idleSince") or "2026-03-01T12:00:00Z")


@pytest.mark.parametrize(("count", "order"), [(3, 1), (2, -1)], ids=["more", "in another order"])
def test_workers_that_report_other_stages_are_named_with_what_to_do(
    make: Any, count: int, order: int
) -> None:
    """Nothing can be admitted then; it used to be said nowhere."""
    report = make.report(make.reported("Prepared"), count=count)
    report = report.model_copy(update={"stages": report.stages[::order]})
    made = decision(make, make.task(), group=make.group(), contact=Contact(report=report))
    status = made.pipeline_statuses[TOY]
    assert ready(status) == ("False", "StagesDiffer")
    words = next(one.message for one in status.conditions if one.type == "Ready")
    assert "but spec.stages is 2" in words
    assert "Delete the pods" in words
    task = made.task_statuses[Key("team-a", "t1")]
    assert task.state == "Pending"
    assert words in next(one.message for one in task.conditions if one.type == "Admitted")


def test_idle_workers_do_not_stay_for_a_clock_that_was_ahead(make: Any) -> None:
    pipeline = make.pipeline(status={"idleSince": "2026-03-02T12:00:00Z"})
    made = decision(make, pipelines=(pipeline,), group=make.group())
    assert made.pipeline_statuses[TOY].idle_since == "2026-03-01T12:00:00Z"


def test_a_task_that_comes_stops_the_clock(make: Any) -> None:
    status = {"idleSince": "2026-03-01T11:00:00Z"}
    made = decision(make, make.task(), pipelines=(make.pipeline(status=status),), group=make.group())
    assert replicas(made) == 2
    assert made.pipeline_statuses[TOY].idle_since is None


def test_without_the_keys_of_its_store_a_pipeline_says_so_and_starts_nothing(make: Any) -> None:
    pipeline = make.pipeline(storage={"secretRef": {"name": "models"}})
    made = decision(make, make.task(), pipelines=(pipeline,), secrets={Key("team-a", "models"): None})
    assert replicas(made) is None
    assert ready(made.pipeline_statuses[TOY]) == ("False", "SecretNotFound")
    held = made.task_statuses[Key("team-a", "t1")].conditions[1]
    assert (held.type, held.reason) == ("Admitted", "PipelineStarting")
    assert "models" in held.message


def test_an_invalid_pipeline_is_left_as_it_is(make: Any) -> None:
    broken = make.pipeline(allowedNamespaces={"from": "Selector"})
    made = decision(make, make.task(), pipelines=(broken,), group=make.group())
    assert replicas(made) is None
    assert ready(made.pipeline_statuses[TOY]) == ("False", "InvalidSpec")


# --- a new configuration ---


def running(make: Any) -> Any:
    return make.task(
        status={"pipeline": "team-a/toy", "conditions": [make.condition(*one) for one in RUNNING]}
    )


def test_workers_in_use_finish_before_they_are_replaced_and_nobody_new_gets_in(make: Any) -> None:
    contact = Contact(report=make.report(make.reported("Training"), make.reported("Prepared", "t2")))
    made = decision(make, running(make), make.task("t2"), group=make.group(revision="old"), contact=contact)
    assert replicas(made) is None
    assert made.delete_pods == ()
    assert made.task_statuses[Key("team-a", "t2")].reason == "PipelineUpdating"
    assert [(one.name, one.admitted) for one in made.plans[TOY].tasks] == [("t1", True), ("t2", False)]


def test_more_stages_do_not_disturb_a_task_that_trains(make: Any) -> None:
    contact = Contact(report=make.report(make.reported("Training")))
    made = decision(
        make,
        running(make),
        pipelines=(make.pipeline(stages=3, generation=2),),
        group=make.group(revision="old"),
        contact=contact,
    )
    assert replicas(made) is None
    assert [one.admitted for one in made.plans[TOY].tasks] == [True]


def test_workers_not_in_use_get_the_new_configuration_and_then_their_pods_go(make: Any) -> None:
    contact = Contact(report=make.report(make.reported("Prepared")))
    first = decision(make, make.task(), group=make.group(revision="old"), contact=contact)
    assert replicas(first) == 2
    assert first.delete_pods == ()
    applied = make.group(revision="new", pod_revision="old")
    second = decision(make, make.task(), group=applied, contact=contact)
    assert [pod.key.name for pod in second.delete_pods] == ["mlora-toy-0", "mlora-toy-1"]


def test_a_pod_that_is_stuck_with_a_former_configuration_is_removed_though_tasks_are_told_to_run(
    make: Any,
) -> None:
    stuck = make.group(revision="new", pod_revision="old", ready=1, problem=Cause("ImagePullBackOff", "typo"))
    contact = Contact(report=make.report(make.reported("Training")), lost_since=make.now)
    assert len(decision(make, running(make), group=stuck, contact=contact).delete_pods) == 2


def test_workers_that_got_to_work_just_before_they_were_replaced_finish_first(make: Any) -> None:
    applied = make.group(revision="new", pod_revision="old")
    contact = Contact(report=make.report(make.reported("Training")))
    assert decision(make, running(make), group=applied, contact=contact).delete_pods == ()


def test_pods_of_the_present_configuration_are_left_alone_even_when_stuck(make: Any) -> None:
    stuck = make.group(ready=0, problem=Cause("ImagePullBackOff", "typo"))
    assert decision(make, make.task(), group=stuck).delete_pods == ()


def test_what_was_measured_of_another_spec_is_forgotten(make: Any) -> None:
    status = {"observedGeneration": 1, "facts": make.facts().model_dump(by_alias=True)}
    pipeline = make.pipeline(status=status, generation=2)
    assert decision(make, pipelines=(pipeline,)).pipeline_statuses[TOY].facts is None
    same = make.pipeline(status=status)
    assert decision(make, pipelines=(same,)).pipeline_statuses[TOY].facts == make.facts()


# --- what is said ---


@pytest.mark.parametrize(
    ("story", "group", "contact", "expected"),
    [
        ("starting", {"ready": 1}, Contact(), ("Starting", "False", "Starting")),
        (
            "cannot start",
            {"ready": 1, "problem": Cause("Unschedulable", "0/1 nodes: Insufficient nvidia.com/gpu")},
            Contact(),
            ("Starting", "False", "PodNotStarting"),
        ),
        ("no answer yet", {}, Contact(), ("Starting", "False", "Starting")),
        ("loading", {}, Contact(starting=True), ("Starting", "False", "Starting")),
    ],
)
def test_ready_before_the_first_report(
    make: Any, story: str, group: Any, contact: Contact, expected: tuple[str, str, str]
) -> None:
    status = decision(make, make.task(), group=make.group(**group), contact=contact).pipeline_statuses[TOY]
    assert (status.state, *ready(status)) == expected, story


def test_ready_with_a_report(make: Any) -> None:
    contact = Contact(report=make.report(make.reported("Training"), make.reported("Prepared", "t2")))
    tasks = (make.task(), make.task("t2"))
    status = decision(make, *tasks, group=make.group(), contact=contact).pipeline_statuses[TOY]
    assert (status.state, *ready(status)) == ("Ready", "True", "Ready")
    assert (status.active_tasks, status.waiting_tasks, status.ready_replicas) == (1, 1, 2)
    assert (status.ready, status.update) == ("2/2", None)
    assert status.facts == make.facts()
    assert len(status.stages) == 2


@pytest.mark.parametrize(("phase", "written"), [("Prepared", True), ("Training", False)])
def test_what_crossed_between_the_stages_is_written_when_nobody_trains(
    make: Any, phase: str, written: bool
) -> None:
    wire = WireReport(payload_bytes=1000, tokens=10)
    report = make.report(make.reported(phase)).model_copy(update={"wire": wire})
    made = decision(make, make.task(), group=make.group(), contact=Contact(report=report))
    assert made.pipeline_statuses[TOY].wire == (wire if written else None)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(1, ("True", "Ready")), (20, ("False", "CoordinatorUnreachable"))]
)
def test_a_silent_coordinator_makes_a_pipeline_unready_after_a_while(
    make: Any, seconds: int, expected: tuple[str, str]
) -> None:
    past = {"conditions": [make.condition("Ready", "True", "Ready")]}
    contact = Contact(lost_since=make.now - timedelta(seconds=seconds), error="refused")
    made = decision(
        make, make.task(), pipelines=(make.pipeline(status=past),), group=make.group(), contact=contact
    )
    assert ready(made.pipeline_statuses[TOY]) == expected


@pytest.mark.parametrize(("seconds", "stuck"), [(30, False), (90, True)])
def test_a_pod_that_a_lost_node_keeps_is_named_and_not_forced(make: Any, seconds: int, stuck: bool) -> None:
    group = make.group(ready=1)
    lost = replace(group.pods[1], deleting=True, gone_by=make.now - timedelta(seconds=seconds))
    made = decision(make, running(make), group=replace(group, pods=(group.pods[0], lost)))
    available = made.pipeline_statuses[TOY].conditions[1]
    assert (available.reason == "PodStuckTerminating") is stuck
    assert ("mlora-toy-1" in available.message) is stuck
    assert made.delete_pods == ()


# --- the catalogue ---

CATALOGUE = {"models": [{"name": "Org/Toy-1B", "uri": "s3://models/toy", "stages": 2}]}


def test_a_pipeline_is_made_from_the_catalogue_once(make: Any) -> None:
    settings = make.settings(**CATALOGUE)
    made = decision(make, make.task(), make.task("t2"), pipelines=(), settings=settings)
    (manifest,) = made.new_pipelines
    assert manifest["metadata"]["namespace"] == "mlora-system"
    assert made.task_statuses[Key("team-a", "t1")].reason == "CreatingPipeline"

    there = make.pipeline(
        manifest["metadata"]["name"],
        "mlora-system",
        annotations=manifest["metadata"]["annotations"],
        **manifest["spec"],
    )
    after = decision(make, make.task(), pipelines=(there,), settings=settings)
    assert after.new_pipelines == ()
    assert after.task_statuses[Key("team-a", "t1")].pipeline == str(there.key)


def test_a_corrected_entry_reaches_its_pipeline(make: Any) -> None:
    settings = make.settings(**CATALOGUE)
    (manifest,) = decision(make, make.task(), pipelines=(), settings=settings).new_pipelines
    stale = replace(
        make.pipeline(manifest["metadata"]["name"], "mlora-system", **manifest["spec"]),
        catalogue_hash="former",
    )
    assert decision(make, pipelines=(stale,), settings=settings).new_pipelines == (manifest,)
    foreign = replace(stale, catalogue_hash=None)
    assert decision(make, pipelines=(foreign,), settings=settings).new_pipelines == ()


@pytest.mark.parametrize(
    ("story", "change", "reason", "words"),
    [
        ("it is to be made", {"deleting": True}, "CreatingPipeline", "the operator creates a pipeline"),
        (
            "was not created by the operator",
            {"catalogue_hash": None, "spec": None},
            "NoPipelineForModel",
            "was not created by the operator",
        ),
        ("made wrong by hand", {"spec": None, "problem": "x"}, "NoPipelineForModel", "is invalid"),
        ("given another model by hand", {"spec": "another"}, "NoPipelineForModel", "serves Org/Another"),
        (
            "for its own namespace",
            {"catalogue_hash": None},
            "NamespaceNotAllowed",
            "not for namespace team-a",
        ),
    ],
)
def test_nobody_waits_for_a_pipeline_that_is_not_made_since_its_name_is_taken(
    make: Any, story: str, change: dict[str, Any], reason: str, words: str
) -> None:
    settings = make.settings(**CATALOGUE)
    (manifest,) = decision(make, make.task(), pipelines=(), settings=settings).new_pipelines
    there = make.pipeline(
        manifest["metadata"]["name"],
        "mlora-system",
        annotations=manifest["metadata"]["annotations"],
        **{**manifest["spec"], "allowedNamespaces": {"from": "Same"}},
    )
    if change.get("spec") == "another":
        change = {"spec": make.pipeline(model={"name": "Org/Another"}).spec}
    made = decision(make, make.task(), pipelines=(replace(there, **change),), settings=settings)
    told = made.task_statuses[Key("team-a", "t1")].conditions[0]
    assert (told.type, told.reason) == ("Accepted", reason), story
    assert words in told.message
    assert made.new_pipelines == ()


def test_workers_that_the_api_server_refuses_are_named_on_pipeline_and_task(make: Any) -> None:
    pipeline, task = make.pipeline(), make.task("a")
    words = '422: StatefulSet "mlora-toy" is invalid: spec.template.spec.containers[0].resources: "one"'
    refused = {pipeline.uid: words}
    decision = decide(make.snapshot(task, pipelines=(pipeline,), refused=refused), make.settings(), make.now)
    available = condition(decision.pipeline_statuses[pipeline.key].conditions, c.WORKERS_AVAILABLE)
    assert available is not None
    assert (available.status, available.reason) == ("False", c.REASON_POD_NOT_STARTING)
    assert words in available.message
    admitted = condition(decision.task_statuses[task.key].conditions, c.ADMITTED)
    assert admitted is not None
    assert words in admitted.message


def test_no_group_is_made_for_pods_that_are_left_of_one_that_somebody_deleted(make: Any) -> None:
    left = replace(make.group(), replicas=0, gone=True)
    assert decision(make, group=left).workers == {}
    wanted = decision(make, make.task("a"), group=left)
    assert [wish.replicas for wish in wanted.workers.values()] == [2]
