"""Which pipeline serves a task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlora_operator.manifests.pipeline import pipeline_manifest
from mlora_operator.reconcile.assignment.eligibility import accept
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.references import storage_access
from mlora_operator.reconcile.state.snapshot import Contact, Key, Replica
from mlora_operator.rights import Rights
from mlora_operator.settings import CatalogueModel

KEYS = {"AWS_ACCESS_KEY_ID": "id\n", "AWS_SECRET_ACCESS_KEY": " secret "}
RIGHTS = Rights("mlora-system", frozenset({"platform"}))
CATALOGUE = (CatalogueModel(name="Org/Toy-1B", uri="s3://models/toy"),)


def outcome(
    make: Any, task: Any, *pipelines: Any, catalogue: Any = (), **fields: Any
) -> tuple[str, str | None]:
    found = accept(task, make.snapshot(task, pipelines=pipelines, **fields), catalogue, RIGHTS)
    return found.cause.reason, str(found.pipeline.key) if found.pipeline else None


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


EVERYONE = {"allowedNamespaces": {"from": "All"}}


def catalogues(make: Any, **fields: Any) -> Any:
    """The operator's own, as it makes it."""
    made = pipeline_manifest(CATALOGUE[0], "mlora-system")["metadata"]
    annotations = {**made["annotations"], **fields.pop("annotations", {})}
    return make.pipeline(made["name"], "mlora-system", annotations=annotations, **{**EVERYONE, **fields})


def test_the_order_of_precedence_whatever_the_age(make: Any) -> None:
    """The youngest of all is the one that goes first, and so on: taken away one by one."""
    given = make.pipeline("given", "platform", age=9000, **EVERYONE)
    operators = make.pipeline("by-hand", "mlora-system", age=800, **EVERYONE)
    catalogue = catalogues(make, age=70)
    own = make.pipeline("own", age=6)
    there, found = [given, operators, catalogue, own], []
    while there:
        found.append(outcome(make, make.task(), *there)[1])
        there.pop()
    assert found == ["team-a/own", str(catalogue.key), "mlora-system/by-hand", "platform/given"]


@pytest.mark.parametrize("namespace", ["platform", "mlora-system"])
def test_the_catalogues_is_made_where_it_would_go_first(make: Any, namespace: str) -> None:
    other = make.pipeline("other", namespace, **EVERYONE)
    assert outcome(make, make.task(), other, catalogue=CATALOGUE) == ("CreatingPipeline", None)
    bound = make.task(status={"pipeline": f"{namespace}/other"})
    assert outcome(make, bound, other, catalogue=CATALOGUE) == ("Accepted", f"{namespace}/other")
    own = make.pipeline("own")
    assert outcome(make, make.task(), other, own, catalogue=CATALOGUE) == ("Accepted", "team-a/own")


# --- who may serve others is for the platform team to say -----------------------------------------------------------

MALLORY = "team-m"


@pytest.mark.parametrize(
    ("story", "claim", "serving", "reason"),
    [
        ("All is no right", {"from": "All"}, (), "NamespaceNotAllowed"),
        ("nor is Selector", {"from": "Selector", "selector": {"a": "b"}}, (), "NamespaceNotAllowed"),
        ("its namespace was given the right", {"from": "All"}, (MALLORY,), "Accepted"),
        ("every namespace was", {"from": "All"}, ("*",), "Accepted"),
        ("the right alone is no claim", {"from": "Same"}, (MALLORY,), "NamespaceNotAllowed"),
        ("another's right", {"from": "All"}, ("platform",), "NamespaceNotAllowed"),
    ],
)
def test_a_pipeline_serves_others_only_by_a_right_of_its_namespace(
    make: Any, story: str, claim: Any, serving: tuple[str, ...], reason: str
) -> None:
    pipeline = make.pipeline("mine", MALLORY, allowedNamespaces=claim)
    labels = {"team-a": {"a": "b"}, MALLORY: {}}
    task = make.task()
    snapshot = make.snapshot(task, pipelines=(pipeline,), namespace_labels=labels)
    found = accept(task, snapshot, (), Rights("mlora-system", frozenset(serving)))
    assert found.cause.reason == reason, story
    own = make.task(namespace=MALLORY)
    theirs = accept(own, make.snapshot(own, pipelines=(pipeline,), namespace_labels=labels), (), RIGHTS)
    assert theirs.pipeline is pipeline, "its own namespace it serves, whatever it claims"


def test_a_refusal_neither_names_a_strangers_pipeline_nor_asks_for_another_one(make: Any) -> None:
    task = make.task()
    strangers = make.pipeline("secret-plan", MALLORY, **EVERYONE)
    message = accept(task, make.snapshot(task, pipelines=(strangers,)), (), RIGHTS).cause.message
    assert not [word for word in ("secret-plan", MALLORY, "create a LoRAPipeline") if word in message]
    assert "ask the platform team" in message
    closed = make.pipeline("shared", "platform")
    message = accept(task, make.snapshot(task, pipelines=(strangers, closed)), (), RIGHTS).cause.message
    assert "platform/shared" in message
    assert MALLORY not in message


def test_an_annotation_makes_no_pipeline_the_catalogues(make: Any) -> None:
    """Else whoever wrote it could keep the catalogue's from being made."""
    forged = replace(make.pipeline("x", MALLORY, **EVERYONE), catalogue_hash="x")
    assert outcome(make, make.task(), forged, catalogue=CATALOGUE) == ("CreatingPipeline", None)
    given = replace(make.pipeline("x", "platform", age=9, **EVERYONE), catalogue_hash="x")
    older = make.pipeline("y", "platform", age=99, **EVERYONE)
    assert outcome(make, make.task(), given, older) == ("Accepted", "platform/y")


@pytest.mark.parametrize(("namespace", "reason"), [(MALLORY, "CreatingPipeline"), ("platform", "Accepted")])
def test_a_workers_word_that_it_trains_a_task_counts_only_with_the_right(
    make: Any, namespace: str, reason: str
) -> None:
    task, pipeline = make.task(), make.pipeline("x", namespace, **EVERYONE)
    heard = Contact(report=make.report(make.reported("Training")))
    snapshot = replace(make.snapshot(task, pipelines=(pipeline,)), contacts={pipeline.key: heard})
    assert accept(task, snapshot, CATALOGUE, RIGHTS).cause.reason == reason


def lost_right(make: Any, phase: str, held: str) -> Any:
    """A task of team-a at a pipeline of another namespace that lost its right meanwhile, as that is decided."""
    conditions = [make.condition("Accepted", "True"), make.condition("Running", held)]
    task = make.task(
        storage={"secretRef": {"name": "keys"}},
        status={"pipeline": f"{MALLORY}/x", "conditions": conditions},
    )
    pipeline = make.pipeline("x", MALLORY, **EVERYONE)
    heard = Contact(report=make.report(make.reported(phase)))
    snapshot = replace(
        make.snapshot(task, pipelines=(pipeline,), secrets={Key("team-a", "keys"): KEYS}),
        contacts={pipeline.key: heard},
        groups={pipeline.key: make.group()},
    )
    return decide(snapshot, make.settings(), make.now)


def test_a_task_that_trains_where_the_right_was_taken_away_ends_there_without_new_keys(make: Any) -> None:
    made = lost_right(make, "Training", "True")
    (told,) = made.plans[Key(MALLORY, "x")].tasks
    assert (told.name, told.storage.access_key, told.storage.secret_key) == ("t1", None, None)
    assert made.task_statuses[Key("team-a", "t1")].pipeline == f"{MALLORY}/x"


def test_one_that_waits_there_leaves(make: Any) -> None:
    made = lost_right(make, "Prepared", "False")
    assert made.plans[Key(MALLORY, "x")].tasks == ()
    status = made.task_statuses[Key("team-a", "t1")]
    assert (status.state, status.reason, status.pipeline) == ("Rejected", "NamespaceNotAllowed", None)


def test_nor_does_one_stay_at_what_calls_itself_a_replica_there(make: Any) -> None:
    """A task stays at a replica whose pipeline is gone, since nobody can deal it to another one."""
    task = make.task(status={"pipeline": f"{MALLORY}/x"})
    pipeline = replace(make.pipeline("x", MALLORY, **EVERYONE), replica=Replica("gone", 1, "hash"))
    assert outcome(make, task, pipeline, catalogue=CATALOGUE) == ("CreatingPipeline", None)


def served(make: Any, allowed: str, *, given: bool = False, before: Any = ()) -> Any:
    """What the pipeline says of serving others."""
    selector = {"selector": {"a": "b"}} if allowed == "Selector" else {}
    pipeline = make.pipeline(
        "x", MALLORY, allowedNamespaces={"from": allowed, **selector}, status={"conditions": list(before)}
    )
    settings = make.settings(serving={"namespaces": [MALLORY] if given else []})
    made = decide(make.snapshot(pipelines=(pipeline,)), settings, make.now)
    held = made.pipeline_statuses[pipeline.key].conditions
    return next((one for one in held if one.type == "ServesOthers"), None), made.events


@pytest.mark.parametrize("allowed", ["All", "Selector"])
def test_a_claim_in_vain_is_told_with_what_the_platform_team_must_set(make: Any, allowed: str) -> None:
    said, events = served(make, allowed)
    assert (said.status, said.reason) == ("False", "CrossNamespaceNotAllowed")
    for words in (f"from: {allowed}", f"add {MALLORY} to serving.namespaces", "set from: Same"):
        assert words in said.message
    assert "CrossNamespaceNotAllowed" in [event.reason for event in events]
    again, events = served(make, allowed, before=[said.model_dump(by_alias=True)])
    assert again == said
    assert "CrossNamespaceNotAllowed" not in [event.reason for event in events]


@pytest.mark.parametrize(
    ("story", "allowed", "given", "was", "now"),
    [
        ("nothing is claimed", "Same", False, None, None),
        ("it has the right, as ever", "All", True, None, None),
        ("it was given the right", "All", True, "False", ("True", "CrossNamespaceAllowed")),
        ("it claims nothing any more", "Same", False, "False", None),
    ],
)
def test_nothing_is_said_of_serving_others_where_it_was_never_in_vain(
    make: Any, story: str, allowed: str, given: bool, was: str | None, now: tuple[str, str] | None
) -> None:
    before = [make.condition("ServesOthers", was)] if was else []
    said, _ = served(make, allowed, given=given, before=before)
    assert ((said.status, said.reason) if said else None) == now, story


def test_a_task_stays_with_its_pipeline(make: Any) -> None:
    bound = make.task(status={"pipeline": "team-a/b"})
    assert outcome(make, bound, make.pipeline("a", age=9999), make.pipeline("b"))[1] == "team-a/b"


def test_no_pipeline_names_those_that_there_are(make: Any) -> None:
    task = make.task(baseModel="Org/Typo")
    found = accept(task, make.snapshot(task), CATALOGUE, RIGHTS)
    assert found.cause.reason == "NoPipelineForModel"
    assert "Org/Toy-1B" in found.cause.message


def test_a_pipeline_that_this_namespace_may_not_use_is_not_offered(make: Any) -> None:
    task = make.task(baseModel="Org/Typo", namespace="team-b")
    assert (
        "no base model is available in this namespace yet: ask the platform team"
        in accept(task, make.snapshot(task), (), RIGHTS).cause.message
    )


def test_the_catalogue_is_asked_when_no_pipeline_serves_the_task(make: Any) -> None:
    task = make.task()
    for pipelines in ((), (make.pipeline(namespace="other"),)):
        found = accept(task, make.snapshot(task, pipelines=pipelines), CATALOGUE, RIGHTS)
        assert (found.cause.reason, found.wanted) == ("CreatingPipeline", CATALOGUE[0])


def test_the_catalogues_pipeline_is_not_made_twice(make: Any) -> None:
    closed = catalogues(make, allowedNamespaces={"from": "Same"})
    assert outcome(make, make.task(), closed, catalogue=CATALOGUE)[0] == "NamespaceNotAllowed"


@pytest.mark.parametrize(
    ("story", "data", "reason"),
    [
        ("not there", None, "SecretNotFound"),
        ("half", {"AWS_ACCESS_KEY_ID": "id"}, "SecretIncomplete"),
        ("a file in the place of a key", {**KEYS, "AWS_ACCESS_KEY_ID": "x" * 20_000}, "SecretIncomplete"),
        ("a token without end", {**KEYS, "HF_TOKEN": "x" * 20_000}, "SecretIncomplete"),
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
    assert accept(task, snapshot, (), RIGHTS).cause.reason == "Accepted"


def test_after_a_restart_of_the_operator_the_tasks_own_status_says_that_it_trains(make: Any) -> None:
    status = {"pipeline": "team-a/toy", "conditions": [make.condition("Running", "True")]}
    task = make.task(storage={"secretRef": {"name": "keys"}}, status=status)
    assert accept(task, make.snapshot(task, secrets={}), (), RIGHTS).cause.reason == "Accepted"


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
