"""Which pipeline serves a task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlora_operator.reconcile.accept import accept, storage_access
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.snapshot import Contact, Key
from mlora_operator.settings import CatalogueModel

KEYS = {"AWS_ACCESS_KEY_ID": "id\n", "AWS_SECRET_ACCESS_KEY": " secret "}
CATALOGUE = (CatalogueModel(name="Org/Toy-1B", uri="s3://models/toy"),)


def outcome(
    make: Any, task: Any, *pipelines: Any, catalogue: Any = (), **fields: Any
) -> tuple[str, str | None]:
    found = accept(task, make.snapshot(task, pipelines=pipelines, **fields), catalogue)
    return found.reason, str(found.pipeline.key) if found.pipeline else None


def test_a_pipeline_in_the_own_namespace_serves(make: Any) -> None:
    assert outcome(make, make.task(), make.pipeline()) == ("Accepted", "team-a/toy")


@pytest.mark.parametrize(
    ("story", "allowed", "labels", "reason"),
    [
        ("Same keeps others out", {"from": "Same"}, {}, "NamespaceNotAllowed"),
        ("All lets them in", {"from": "All"}, {}, "Accepted"),
        (
            "the labels fit",
            {"from": "Selector", "selector": {"gpu": "y"}},
            {"gpu": "y", "x": "z"},
            "Accepted",
        ),
        (
            "a label differs",
            {"from": "Selector", "selector": {"gpu": "y"}},
            {"gpu": "n"},
            "NamespaceNotAllowed",
        ),
        ("no labels", {"from": "Selector", "selector": {"gpu": "y"}}, {}, "NamespaceNotAllowed"),
    ],
)
def test_allowed_namespaces(make: Any, story: str, allowed: Any, labels: Any, reason: str) -> None:
    pipeline = make.pipeline(namespace="platform", allowedNamespaces=allowed)
    found, _ = outcome(make, make.task(), pipeline, namespace_labels={"team-a": labels})
    assert found == reason, story


def test_the_own_namespace_comes_before_age_and_age_before_name(make: Any) -> None:
    everyone = {"allowedNamespaces": {"from": "All"}}
    old = make.pipeline("old", "platform", age=9000, **everyone)
    older = make.pipeline("a", "platform", age=9999, **everyone)
    own = make.pipeline("own", age=1)
    assert outcome(make, make.task(), old, older, own)[1] == "team-a/own"
    assert outcome(make, make.task(), old, older)[1] == "platform/a"


def test_a_task_stays_with_its_pipeline(make: Any) -> None:
    bound = make.task(status={"pipeline": "team-a/b"})
    assert outcome(make, bound, make.pipeline("a", age=9999), make.pipeline("b"))[1] == "team-a/b"


def test_no_pipeline_names_those_that_there_are(make: Any) -> None:
    task = make.task(baseModel="Org/Typo")
    found = accept(task, make.snapshot(task), CATALOGUE)
    assert found.reason == "NoPipelineForModel"
    assert "Org/Toy-1B" in found.message


def test_a_pipeline_that_this_namespace_may_not_use_is_not_offered(make: Any) -> None:
    task = make.task(baseModel="Org/Typo", namespace="team-b")
    assert "make a LoRAPipeline" in accept(task, make.snapshot(task), ()).message


def test_the_catalogue_is_asked_when_no_pipeline_serves_the_task(make: Any) -> None:
    task = make.task()
    for pipelines in ((), (make.pipeline(namespace="other"),)):
        found = accept(task, make.snapshot(task, pipelines=pipelines), CATALOGUE)
        assert (found.reason, found.wanted) == ("CreatingPipeline", CATALOGUE[0])


def test_the_catalogues_pipeline_is_not_made_twice(make: Any) -> None:
    closed = replace(make.pipeline(namespace="mlora-system"), catalogue_hash="x")
    assert outcome(make, make.task(), closed, catalogue=CATALOGUE)[0] == "NamespaceNotAllowed"


@pytest.mark.parametrize(
    ("story", "data", "reason"),
    [
        ("not there", None, "SecretNotFound"),
        ("half", {"AWS_ACCESS_KEY_ID": "id"}, "SecretIncomplete"),
        ("only white space", {**KEYS, "AWS_SECRET_ACCESS_KEY": " \n"}, "SecretIncomplete"),
        ("whole", KEYS, "Accepted"),
    ],
)
def test_secrets(make: Any, story: str, data: Any, reason: str) -> None:
    task = make.task(storage={"secretRef": {"name": "keys"}})
    secrets = {Key("team-a", "keys"): data}
    assert outcome(make, task, make.pipeline(), secrets=secrets)[0] == reason, story


def test_a_task_that_trains_is_not_thrown_out_while_its_secret_is_replaced(make: Any) -> None:
    task = make.task(storage={"secretRef": {"name": "keys"}}, status={"pipeline": "team-a/toy"})
    contact = Contact(report=make.report(make.reported("Training")))
    snapshot = make.snapshot(task, contact=contact, secrets={Key("team-a", "keys"): None})
    assert accept(task, snapshot, ()).reason == "Accepted"


def test_after_a_restart_of_the_operator_the_tasks_own_status_says_that_it_trains(make: Any) -> None:
    status = {"pipeline": "team-a/toy", "conditions": [make.condition("Running", "True")]}
    task = make.task(storage={"secretRef": {"name": "keys"}}, status=status)
    assert accept(task, make.snapshot(task, secrets={}), ()).reason == "Accepted"


@pytest.mark.parametrize(
    ("phase", "succeeded"),
    [("Succeeded", "True"), ("Failed", "False"), ("Prepared", None), ("Preparing", None)],
)
def test_a_task_that_has_ended_is_not_thrown_out_before_its_status_says_so(
    make: Any, phase: str, succeeded: str | None
) -> None:
    status = {"pipeline": "team-a/toy", "conditions": [make.condition("Accepted", "True")]}
    task = make.task(storage={"secretRef": {"name": "keys"}}, status=status)
    contact = Contact(report=make.report(make.reported(phase)))
    snapshot = make.snapshot(task, contact=contact, group=make.group(), secrets={Key("team-a", "keys"): None})
    told = decide(snapshot, make.settings(), make.now).task_statuses[task.key]
    held = {one.type: one.status for one in told.conditions}
    assert (held["Accepted"], held.get("Succeeded")) == ("True" if succeeded else "False", succeeded)


def test_keys_are_stripped_of_white_space(make: Any) -> None:
    task = make.task(storage={"endpoint": "http://s3:8333", "secretRef": {"name": "keys"}})
    access = storage_access(task, {Key("team-a", "keys"): KEYS})
    assert access is not None
    assert access.endpoint == "http://s3:8333"
    assert access.access_key is not None
    assert access.secret_key is not None
    assert (access.access_key.get_secret_value(), access.secret_key.get_secret_value()) == ("id", "secret")
    assert "secret'" not in repr(access)
