"""The API server gives no answer for a Secret, a ConfigMap or a namespace: that does not mean that there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlora_operator.reconcile.assignment.eligibility import accept
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import Contact, Key
from mlora_operator.rights import Rights
from mlora_operator.settings import CatalogueModel
from mlora_worker.protocol import Plan

TOY, KEYS = Key("team-a", "toy"), Key("team-a", "keys")
RIGHTS = Rights("mlora-system", frozenset({"team-a"}))
WITH_SECRET = {"storage": {"secretRef": {"name": "keys"}}}
WITH_ROWS = {"dataset": {"uri": None, "configMapRef": {"name": "rows", "key": "rows.jsonl"}}}
SELECTS = {"allowedNamespaces": {"from": "Selector", "selector": {"gpu": "yes"}}}


def accepted(make: Any, **spec: Any) -> dict[str, Any]:
    held = [make.condition("Accepted", "True"), make.condition("Admitted", "False")]
    return {"status": {"pipeline": "team-a/toy", "conditions": held}, **spec}


@pytest.mark.parametrize(
    ("task", "pipeline"),
    [(WITH_SECRET, {}), (WITH_ROWS, {}), ({}, SELECTS)],
    ids=["Secret", "ConfigMap", "labels"],
)
def test_an_accepted_task_stays_so_and_a_new_one_waits(make: Any, task: Any, pipeline: Any) -> None:
    catalogue = (CatalogueModel(name=make.model, uri="s3://models/toy"),)
    for fields, reason in ((accepted(make, **task), "Accepted"), (task, "ReadError")):
        one = make.task(**fields)
        snapshot = make.snapshot(one, pipelines=(make.pipeline(**pipeline),))
        assert accept(one, snapshot, catalogue, RIGHTS).cause.reason == reason
    settings = make.settings(serving={"namespaces": ["team-a"]})
    status = decide(snapshot, settings, make.now).task_statuses[one.key]
    assert (status.state, status.reason) == ("Pending", "ReadError")


def test_a_new_task_goes_where_no_labels_have_to_be_read(make: Any) -> None:
    task = make.task()
    snapshot = make.snapshot(task, pipelines=(make.pipeline(**SELECTS), make.pipeline("open")))
    found = accept(task, snapshot, (), RIGHTS)
    assert found.pipeline is not None
    assert found.pipeline.key.name == "open"


def test_what_the_coordinator_has_of_an_accepted_task_it_keeps(make: Any) -> None:
    task = make.task(**accepted(make, **WITH_SECRET))
    contact = Contact(report=make.report(make.reported("Preparing")))
    decision = decide(make.snapshot(task, group=make.group(), contact=contact), make.settings(), make.now)
    assert [one.name for one in decision.plans[TOY].tasks] == ["t1"]
    assert decision.task_statuses[task.key].state == "Preparing"


def test_one_that_the_coordinator_does_not_have_holds_up_no_others(make: Any) -> None:
    task, other = make.task(**accepted(make, **WITH_SECRET)), make.task("t2")
    contact = Contact(report=make.report(make.reported("Prepared", "t2")))
    decision = decide(
        make.snapshot(task, other, group=make.group(), contact=contact), make.settings(), make.now
    )
    assert [(one.name, one.admitted) for one in decision.plans[TOY].tasks] == [("t2", True)]


@pytest.mark.parametrize(
    ("story", "replicas", "secrets", "wanted"),
    [
        ("they run", 2, {}, 2),
        ("there are none yet", None, {}, None),
        ("they run, and the Secret is really gone", 2, {Key("team-a", "models"): None}, 0),
    ],
)
def test_workers_stay_while_the_keys_of_their_store_cannot_be_read(
    make: Any, story: str, replicas: int | None, secrets: Any, wanted: int | None
) -> None:
    snapshot = make.snapshot(
        make.task(),
        pipelines=(make.pipeline(storage={"secretRef": {"name": "models"}}),),
        group=make.group(replicas) if replicas is not None else None,
        secrets=secrets,
    )
    decision = decide(snapshot, make.settings(), make.now)
    group = decision.workers.get(TOY)
    assert (group.replicas if group is not None else None) == wanted, story
    ready = next(one for one in decision.pipeline_statuses[TOY].conditions if one.type == "Ready")
    assert (ready.reason == "ReadError") is (story == "there are none yet")


def test_a_preempted_task_keeps_its_steps_while_its_secret_is_missing(make: Any) -> None:
    task = make.task(**accepted(make, **WITH_SECRET))
    other = make.task("t2")
    contact = Contact(
        report=make.report(make.reported("Preempted", step=7), sequence=9),
        sent=Plan(generation=1, tasks=()),
        sent_run="run-1",
        sent_sequence=8,
    )
    snapshot = make.snapshot(task, other, group=make.group(), contact=contact, secrets={KEYS: None})
    decision = decide(snapshot, make.settings(), make.now)
    assert "t1" in [one.name for one in decision.plans[TOY].tasks]
    assert decision.task_statuses[task.key].pipeline == "team-a/toy"


def test_a_task_that_waits_for_something_unreadable_says_the_cause(make: Any) -> None:
    task = make.task(**WITH_SECRET)
    snapshot = replace(
        make.snapshot(task, pipelines=(make.pipeline(),)),
        unread={("Secret", KEYS): "403: secrets is forbidden"},
    )
    found = accept(task, snapshot, (), RIGHTS)
    assert found.cause.reason == "ReadError"
    assert found.cause.message.startswith(
        "spec.storage.secretRef: the operator cannot read Secret keys in namespace team-a"
    )
    assert "(403: secrets is forbidden)" in found.cause.message
