"""Between namespaces a claim to a place is worth what its task has proven."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import Contact, Key, Task
from mlora_worker.protocol import Plan

SHARED = Key("team-a", "toy")  # in a namespace that may serve others
SETTINGS: dict[str, Any] = {"serving": {"namespaces": ["team-a"]}}
DATA = {"rows": 10, "used": 9}
PLACE = "s3://adapters/x"


def task(
    make: Any,
    name: str,
    namespace: str,
    uri: str = PLACE,
    *,
    accepted: bool = True,
    data: bool = False,
    **fields: Any,
) -> Task:
    """``data``: its status has counts of rows, and so its worker has written to its output before."""
    held = [
        make.condition("Accepted", "True", "Accepted"),
        make.condition("Admitted", "False", "PreparingData"),
    ]
    status = {"conditions": held, "pipeline": str(SHARED)} if accepted else {}
    status |= {"data": DATA} if data else {}
    return make.task(
        name, namespace, output={"uri": uri}, status={**status, **fields.pop("status", {})}, **fields
    )


def decided(
    make: Any, *tasks: Task, reports: Any = (), told: Any = (), pipelines: Any = None, **settings: Any
) -> Any:
    """``told``: names of tasks that the coordinator was told to admit."""
    contact = Contact(report=make.report(*reports))
    if told:
        plans = tuple(one.model_copy(update={"admitted": one.name in told}) for one in planned(make, *tasks))
        contact = replace(contact, sent=Plan(generation=1, tasks=plans), sent_run="run-1", sent_sequence=1)
    known = pipelines or (make.pipeline(SHARED.name, SHARED.namespace, allowedNamespaces={"from": "All"}),)
    snapshot = make.snapshot(*tasks, pipelines=known, group=make.group(), contact=contact)
    return decide(snapshot, make.settings(**{**SETTINGS, **settings}), make.now)


def planned(make: Any, *tasks: Task) -> Any:
    return decided(make, *tasks).plans[SHARED].tasks


def reasons(make: Any, *tasks: Task, **fields: Any) -> dict[str, str]:
    made = decided(make, *tasks, **fields)
    return {key.name: one.conditions[0].reason for key, one in made.task_statuses.items()}


def prepared(make: Any, *tasks: Task, phase: str = "Prepared") -> Any:
    return [make.reported(phase, one.key.name, one.key.namespace) for one in tasks]


@pytest.mark.parametrize("squatted", ["s3://adapters/x", "s3://adapters/x/y", "s3://adapters/x/y/z"])
def test_who_only_names_a_place_keeps_nobody_of_another_namespace_away(make: Any, squatted: str) -> None:
    """Older, accepted, without a Secret; its worker has not written there, and never will."""
    squatter = task(make, "squatter", "team-m", squatted, age=9999, priority=-1_000_000)
    owner = task(make, "owner", "team-b", "s3://adapters/x/y", accepted=False)
    assert reasons(make, squatter, owner) == {"squatter": "Accepted", "owner": "Accepted"}
    failed = prepared(make, squatter, phase="Preparing")
    assert reasons(make, squatter, owner, reports=failed)["owner"] == "Accepted"


@pytest.mark.parametrize(
    ("story", "phase", "data", "expected"),
    [
        ("its worker has just written there", "Prepared", False, "OutputInUseByOtherNamespace"),
        ("it is being prepared", "Preparing", False, "Accepted"),
        ("its worker could not write there", "Failed", False, "Failed"),
        ("nobody has heard of it yet", None, False, "Accepted"),
        ("it was prepared before", None, True, "Accepted"),
    ],
)
def test_a_task_learns_that_the_place_is_taken_once_it_has_shown_that_it_may_write_there(
    make: Any, story: str, phase: str | None, data: bool, expected: str
) -> None:
    owner = task(make, "owner", "team-b", data=True, age=5)
    asker = task(make, "asker", "team-m", age=9, data=data)
    reports = prepared(make, asker, phase=phase) if phase else []
    made = decided(make, owner, asker, reports=[*prepared(make, owner), *reports])
    status = made.task_statuses[asker.key]
    found = "Failed" if status.state == "Failed" else status.conditions[0].reason
    assert found == expected, story
    if expected == "OutputInUseByOtherNamespace":
        assert asker.uid not in [one.uid for one in made.plans[SHARED].tasks]


@pytest.mark.parametrize(
    "place", ["s3://adapters/x", "s3://adapters/x/plans/2027", "s3://adapters/x/plans/2027/a/b"]
)
def test_the_message_names_neither_task_nor_path_of_the_other(make: Any, place: str) -> None:
    owner = task(make, "secret-plan", "team-b", "s3://adapters/x/plans/2027", data=True)
    asker = task(make, "asker", "team-m", place)
    made = decided(make, owner, asker, reports=prepared(make, owner, asker))
    status = made.task_statuses[asker.key]
    assert status.reason == "OutputInUseByOtherNamespace"
    told = status.model_dump_json() + "".join(
        event.message for event in made.events if event.about == asker.key
    )
    assert not [word for word in ("secret-plan", "team-b", "s3://", "plans") if word in told]
    assert status.conditions[0].message == (
        "spec.output.uri: a task of another namespace writes to this folder, or to one above or below it: choose "
        "another "
        "spec.output.uri"
    ), "the same wherever the other one writes"


def test_a_new_task_is_told_nothing_before_its_worker_has_tried(make: Any) -> None:
    owner = task(make, "owner", "team-b", data=True)
    asker = task(make, "asker", "team-m", accepted=False)
    assert reasons(make, owner, asker) == {"owner": "Accepted", "asker": "Accepted"}


def test_tasks_of_one_namespace_are_no_strangers_to_each_other(make: Any) -> None:
    """Both were accepted before outputs were compared."""
    first, second = task(make, "first", "team-a", data=True), task(make, "second", "team-a", age=1)
    found = reasons(make, first, second, reports=prepared(make, first, second))
    assert found == {"first": "Accepted", "second": "Accepted"}


def test_of_two_that_prove_it_at_once_the_older_has_the_place(make: Any) -> None:
    old, young = task(make, "old", "team-b", age=9), task(make, "young", "team-m", age=1)
    for both in ((old, young), (young, old)):
        found = reasons(make, *both, reports=prepared(make, *both))
        assert found == {"old": "Accepted", "young": "OutputInUseByOtherNamespace"}


@pytest.mark.parametrize(("told", "phase"), [(("young",), "Prepared"), ((), "Training"), ((), "Preempted")])
def test_who_may_have_begun_is_not_thrown_out_by_an_older_one_that_comes_later(
    make: Any, told: tuple[str, ...], phase: str
) -> None:
    old, young = task(make, "old", "team-b", age=9), task(make, "young", "team-m", age=1)
    reports = [*prepared(make, old), *prepared(make, young, phase=phase)]
    found = reasons(make, old, young, reports=reports, told=told)
    assert found == {"old": "OutputInUseByOtherNamespace", "young": "Accepted"}


def test_what_a_tenants_own_pipeline_says_proves_nothing_to_others(make: Any) -> None:
    """It runs what its tenant likes, and may report a task as prepared that never wrote anything."""
    own = make.pipeline("own", "team-m")
    squatter = task(make, "squatter", "team-m", data=True, status={"pipeline": str(own.key)}, age=9)
    asker = task(make, "asker", "team-b")
    shared = make.pipeline(SHARED.name, SHARED.namespace, allowedNamespaces={"from": "All"})
    found = reasons(make, squatter, asker, reports=prepared(make, asker), pipelines=(shared, own))
    assert found == {"squatter": "Accepted", "asker": "Accepted"}
    neighbour = task(make, "neighbour", "team-m", accepted=False)
    found = reasons(make, squatter, neighbour, pipelines=(shared, own))
    assert found["neighbour"] == "OutputInUse", "in its own namespace its word is enough"


def test_counts_of_rows_that_another_pipeline_made_are_not_taken_over(make: Any) -> None:
    """Else a tenant's own pipeline could make the proof, and the task then move to a shared one."""
    moved = task(make, "moved", "team-m", data=True, status={"pipeline": "team-m/own"}, age=9)
    owner = task(make, "owner", "team-b", age=1)
    made = decided(make, moved, owner, reports=prepared(make, owner))
    assert made.task_statuses[owner.key].conditions[0].reason == "Accepted"
    held = made.task_statuses[moved.key]
    assert (held.pipeline, held.data) == (str(SHARED), None)


def test_a_finished_adapter_keeps_its_place_against_all(make: Any) -> None:
    ended = [make.condition("Accepted", "True"), make.condition("Succeeded", "True", "AdapterUploaded")]
    done = task(make, "done", "team-b", data=True, status={"conditions": ended})
    asker = task(make, "asker", "team-m")
    assert reasons(make, done, asker, reports=prepared(make, asker)) == {
        "asker": "OutputInUseByOtherNamespace"
    }


def test_one_that_was_told_stays_out_without_being_prepared_again_and_follows_once_the_place_is_free(
    make: Any,
) -> None:
    owner, asker = task(make, "owner", "team-b", data=True), task(make, "asker", "team-m")
    made = decided(make, owner, asker, reports=prepared(make, owner, asker))
    out = replace(asker, status=made.task_statuses[asker.key])
    for _ in range(3):
        made = decided(make, owner, out, reports=prepared(make, owner))
        out = replace(out, status=made.task_statuses[out.key])
        assert out.status.reason == "OutputInUseByOtherNamespace"
        assert [one.name for one in planned(make, owner, out)] == ["owner"]
    made = decided(make, replace(owner, deleting=True), out)
    assert made.task_statuses[out.key].conditions[0].reason == "Accepted"


# --- whole buckets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uri", ["s3://adapters", "s3://adapters/"])
def test_a_whole_bucket_is_no_output(make: Any, uri: str) -> None:
    made = decided(make, task(make, "all", "team-a", uri, accepted=False))
    status = made.task_statuses[Key("team-a", "all")]
    assert (status.state, status.reason) == ("Rejected", "InvalidSpec")
    assert "add a prefix for this adapter, such as s3://adapters/all" in status.conditions[0].message


def test_one_that_trains_into_a_whole_bucket_since_before_that_was_refused_ends_and_keeps_nobody_away(
    make: Any,
) -> None:
    running = [make.condition("Accepted", "True"), make.condition("Running", "True", "Training")]
    old = task(make, "all", "team-a", "s3://adapters", data=True, status={"conditions": running})
    others = [task(make, "t1", "team-a", accepted=False), task(make, "t2", "team-b")]
    reports = [*prepared(make, old, phase="Training"), *prepared(make, others[1])]
    found = reasons(make, old, *others, reports=reports)
    assert found == {"all": "Accepted", "t1": "Accepted", "t2": "Accepted"}


# --- prefixes that the platform team gives --------------------------------------------------------------------------

GIVEN = {
    "team-a": ["s3://adapters/team-a", "s3://adapters/shared"],
    "team-b": ["s3://adapters/team-b/", "s3://adapters/shared", "s3://adapters/team-a/for-b"],
    "team-c": ["s3://c"],
}


@pytest.mark.parametrize(
    ("story", "namespace", "uri", "allowed"),
    [
        ("its own", "team-a", "s3://adapters/team-a/x", True),
        ("the prefix itself", "team-b", "s3://adapters/team-b", True),
        ("another's", "team-m", "s3://adapters/team-a/x", False),
        ("another's, spelt otherwise", "team-m", "s3://adapters/team-a/x/", False),
        ("above another's", "team-m", "s3://adapters/team-a", False),
        ("a name that begins alike", "team-m", "s3://adapters/team-ab/x", True),
        ("both have it", "team-b", "s3://adapters/shared/x", True),
        ("neither of both", "team-m", "s3://adapters/shared/x", False),
        ("nobody was given it", "team-m", "s3://adapters/elsewhere", True),
        ("another's bucket", "team-m", "s3://c/x", False),
        ("the longest counts", "team-b", "s3://adapters/team-a/for-b/x", True),
        ("also against whom the shorter was given", "team-a", "s3://adapters/team-a/for-b/x", False),
        ("its own, but above another's", "team-a", "s3://adapters/team-a", False),
    ],
)
def test_below_a_prefix_that_was_given_only_its_namespaces_write(
    make: Any, story: str, namespace: str, uri: str, allowed: bool
) -> None:
    one = task(make, "t1", namespace, uri, accepted=False)
    made = decided(make, one, outputs={"prefixes": GIVEN})
    assert made.task_statuses[one.key].conditions[0].reason == (
        "Accepted" if allowed else "OutputNotAllowed"
    ), story


@pytest.mark.parametrize("endpoint", [None, "http://s3.storage:8333", "http://another-name:8333"])
def test_a_prefix_holds_for_every_name_of_the_store(make: Any, endpoint: str | None) -> None:
    fields = {"storage": {"endpoint": endpoint}} if endpoint else {}
    one = task(make, "t1", "team-m", "s3://adapters/team-a/x", accepted=False, **fields)
    assert reasons(make, one, outputs={"prefixes": GIVEN}) == {"t1": "OutputNotAllowed"}


S3 = "http://s3.storage:8333"
OTHER_SPELLINGS = [
    ("the bucket in the endpoint's path", {"endpoint": f"{S3}/adapters"}, "s3://team-a/x"),
    ("the host made of bucket and endpoint", {"endpoint": "http://svc:8333", "addressing": "virtual"},
     "s3://s3.storage/adapters/team-a/x"),
    ("the same without a suffix", {"endpoint": "http://storage:8333", "addressing": "virtual"},
     "s3://s3x/adapters/team-a/x"),
    ("the same on AWS", {"endpoint": "http://amazonaws.com", "addressing": "virtual"},
     "s3://s3.eu-central-1/adapters/team-a/x"),
    ("the bucket in the endpoint's host", {"endpoint": "http://adapters.s3.storage:8333"}, "s3://team-a/x"),
    ("the bucket in AWS's host", {"endpoint": "https://adapters.s3.eu-west-1.amazonaws.com"}, "s3://team-a/x"),
    ("the bucket in the host", {"endpoint": S3, "addressing": "virtual"}, "s3://adapters/team-a/x"),
]  # fmt: skip


@pytest.mark.parametrize(("story", "storage", "uri"), OTHER_SPELLINGS)
def test_a_prefix_holds_for_every_spelling_of_a_request(
    make: Any, story: str, storage: Any, uri: str
) -> None:
    one = task(make, "t1", "team-m", uri, accepted=False, storage=storage)
    condition = decided(make, one, outputs={"prefixes": GIVEN}).task_statuses[one.key].conditions[0]
    assert condition.reason == "OutputNotAllowed", story
    assert "has reserved" in condition.message
    own = task(make, "t1", "team-a", uri, accepted=False, storage=storage)
    assert reasons(make, own, outputs={"prefixes": GIVEN}) == {"t1": "Accepted"}, story


def test_a_refusal_says_which_place_a_store_may_read(make: Any) -> None:
    storage = {"endpoint": f"{S3}/adapters"}
    one = task(make, "t1", "team-m", "s3://team-a/x", accepted=False, storage=storage)
    message = decided(make, one, outputs={"prefixes": GIVEN}).task_statuses[one.key].conditions[0].message
    assert "has reserved s3://adapters/team-a/x, which a store may read in the request" in message


@pytest.mark.parametrize(("story", "storage", "uri"), OTHER_SPELLINGS)
def test_a_place_is_held_in_every_spelling(make: Any, story: str, storage: Any, uri: str) -> None:
    host = "http://s3x.storage:8333" if "s3x" in uri else S3
    plain = {} if "amazonaws" in storage["endpoint"] else {"storage": {"endpoint": host}}
    held = task(make, "held", "team-a", "s3://adapters/team-a/x", data=True, **plain)
    own = task(make, "own", "team-a", uri, accepted=False, storage=storage)
    strange = task(make, "strange", "team-m", uri, storage=storage)
    found = reasons(make, held, own, strange, reports=prepared(make, strange))
    assert found == {"held": "Accepted", "own": "OutputInUse", "strange": "OutputInUseByOtherNamespace"}, (
        story
    )


def test_a_folder_that_may_be_a_whole_bucket_keeps_no_stranger_from_below_it(make: Any) -> None:
    """Requested is http://s3.storage.svc:8333/adapters."""
    storage = {"endpoint": "http://svc:8333", "addressing": "virtual"}
    broad = task(make, "broad", "team-m", "s3://s3.storage/adapters", data=True, storage=storage)
    other = task(make, "other", "team-a", "s3://adapters/x", storage={"endpoint": S3})
    same = task(make, "same", "team-b", "s3://s3.storage/adapters", storage=storage)
    found = reasons(make, broad, other, same, reports=prepared(make, other, same))
    assert found == {"broad": "Accepted", "other": "Accepted", "same": "OutputInUseByOtherNamespace"}


def test_a_whole_bucket_of_aws_is_no_output_in_any_spelling(make: Any) -> None:
    storage = {"endpoint": "http://amazonaws.com", "addressing": "virtual"}
    one = task(make, "t1", "team-m", "s3://s3.eu-central-1/adapters", accepted=False, storage=storage)
    assert reasons(make, one) == {"t1": "InvalidSpec"}


def test_a_host_of_very_many_parts_is_refused(make: Any) -> None:
    for parts, reason in ((16, "Accepted"), (17, "InvalidSpec")):
        storage = {"endpoint": "http://" + ".".join("abcdefghijklmnopq"[:parts])}
        assert reasons(make, task(make, "t1", "team-m", accepted=False, storage=storage)) == {"t1": reason}


def test_a_refusal_names_the_own_prefixes_and_no_others(make: Any) -> None:
    one = task(make, "t1", "team-b", "s3://adapters/team-a/x", accepted=False)
    message = decided(make, one, outputs={"prefixes": GIVEN}).task_statuses[one.key].conditions[0].message
    assert (
        "choose one below s3://adapters/shared, s3://adapters/team-a/for-b, s3://adapters/team-b/" in message
    )
    stranger = task(make, "t1", "team-m", "s3://adapters/team-a/x", accepted=False)
    message = (
        decided(make, stranger, outputs={"prefixes": GIVEN}).task_statuses[stranger.key].conditions[0].message
    )
    assert not [word for word in ("team-a", "team-b", "s3://") if word in message]


def test_one_that_trains_where_a_prefix_was_given_since_is_left_in_peace(make: Any) -> None:
    running = [make.condition("Accepted", "True"), make.condition("Running", "True", "Training")]
    one = task(make, "t1", "team-m", "s3://adapters/team-a/x", status={"conditions": running})
    for phase, reason in (("Training", "Accepted"), ("Prepared", "OutputNotAllowed")):
        found = reasons(make, one, reports=prepared(make, one, phase=phase), outputs={"prefixes": GIVEN})
        assert found == {"t1": reason}
