"""No two tasks write to one place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.output_folders import folders, overlap
from mlora_operator.reconcile.state.snapshot import Contact, Key

S3 = "http://s3.storage:8333"


@pytest.mark.parametrize(
    ("story", "one", "other"),
    [
        ("a trailing slash", (S3, "s3://a/b"), (S3, "s3://a/b/")),
        ("the case of the host", (S3, "s3://a/b"), ("http://S3.Storage:8333", "s3://a/b")),
        ("a slash behind the endpoint", (S3, "s3://a/b"), (S3 + "/", "s3://a/b")),
        ("the port of http", ("http://s3", "s3://a/b"), ("http://s3:80", "s3://a/b")),
        ("the port of https", ("https://s3", "s3://a/b"), ("https://s3:443/", "s3://a/b")),
        ("the cluster's suffix", (S3, "s3://a/b"), ("http://s3.storage.svc.cluster.local:8333", "s3://a/b")),
        ("the short suffix", (S3, "s3://a/b"), ("http://s3.storage.svc:8333", "s3://a/b")),
        ("regions of AWS", (None, "s3://a/b"), ("https://s3.eu-west-1.amazonaws.com", "s3://a/b")),
        ("a file's escapes", (None, "file:///a%20b/%C3%BC"), (None, "file:///a b/\u00fc")),
        ("a file's store", (S3, "file:///a/b"), (None, "file:///a/b/")),
    ],
)
def test_spellings_of_one_place(
    story: str, one: tuple[str | None, str], other: tuple[str | None, str]
) -> None:
    assert folders(*one) == folders(*other), story


@pytest.mark.parametrize(
    ("story", "one", "other"),
    [
        ("another bucket", (S3, "s3://a/b"), (S3, "s3://c/b")),
        ("another port", (S3, "s3://a/b"), ("http://s3.storage:8334", "s3://a/b")),
        ("another host", (S3, "s3://a/b"), (None, "s3://a/b")),
        ("keys have a case", (S3, "s3://a/b"), (S3, "s3://a/B")),
        ("a name that begins alike", (S3, "s3://a/b"), (S3, "s3://a/b1")),
        ("a file is no object", (None, "s3://a/b"), (None, "file:///a/b")),
    ],
)
def test_other_places(story: str, one: tuple[str | None, str], other: tuple[str | None, str]) -> None:
    assert not overlap(folders(*one), folders(*other)), story


@pytest.mark.parametrize(
    "wrong",
    [
        {"storage": {"endpoint": "http://["}},
        {"storage": {"endpoint": "http://s3]"}},
        {"storage": {"endpoint": "http://s3\u2100.org"}},
        {"output": {"uri": "s3://a//b"}},
        {"output": {"uri": "s3://a/./b"}},
        {"output": {"uri": "s3://a/b/../c"}},
        {"output": {"uri": "s3://A/b"}},
        {"output": {"uri": "s3://a/b*"}},
        {"output": {"uri": "file:///a/%2e%2e/b"}},
        {"output": {"uri": "file:///a/b%2Fc"}},
        {"output": {"uri": "file:///a/b%00c"}},
        {"output": {"uri": "file://localhost/a"}},
    ],
)
def test_what_is_no_address_is_refused_and_keeps_nobody_else_out(make: Any, wrong: Any) -> None:
    told = answers(make, make.task("odd", age=9, **wrong), make.task("other"))
    assert told["team-a/odd"][0] == "InvalidSpec"
    assert "spec." in told["team-a/odd"][1]
    assert told["team-a/other"][0] == "Accepted"


PARTS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4)


@given(PARTS, PARTS)
def test_overlap_is_being_above_below_or_equal(one: list[str], other: list[str]) -> None:
    a, b = "/".join(one) + "/", "/".join(other) + "/"
    expected = a.startswith(b) or b.startswith(a)
    assert overlap(folders(S3, f"s3://{a}"), folders(S3, f"s3://{b}")) == expected


def answers(
    make: Any, *tasks: Any, contact: Contact | None = None, **fields: Any
) -> dict[str, tuple[str, str]]:
    """Name to reason and message of Accepted."""
    fields.setdefault("pipelines", (make.pipeline(allowedNamespaces={"from": "All"}),))
    settings = make.settings(serving={"namespaces": ["team-a"]})
    made = decide(make.snapshot(*tasks, contact=contact, **fields), settings, make.now)
    return {
        str(key): (status.conditions[0].reason, status.conditions[0].message)
        for key, status in made.task_statuses.items()
    }


def refused(make: Any, *tasks: Any, **fields: Any) -> set[str]:
    return {name for name, said in answers(make, *tasks, **fields).items() if said[0] == "OutputInUse"}


@pytest.mark.parametrize(
    ("story", "first", "second", "in_use"),
    [
        ("equal", "s3://a/x", "s3://a/x/", True),
        ("below", "s3://a/x", "s3://a/x/y", True),
        ("above", "s3://a/x/y/z", "s3://a/x", True),
        ("beside", "s3://a/x", "s3://a/y", False),
    ],
)
def test_of_two_new_tasks_the_older_has_the_place(
    make: Any, story: str, first: str, second: str, in_use: bool
) -> None:
    old = make.task("old", age=60, output={"uri": first})
    young = make.task("young", age=30, output={"uri": second})
    expected = {"team-a/young"} if in_use else set()
    assert refused(make, old, young) == refused(make, young, old) == expected, story


def test_a_task_of_the_same_namespace_is_named_and_what_to_do(make: Any) -> None:
    old, young = (
        make.task(name, age=age, output={"uri": "s3://a/x"}) for name, age in (("old", 9), ("young", 1))
    )
    message = answers(make, old, young)["team-a/young"][1]
    assert (
        message
        == "spec.output.uri: task old writes there: delete that task, or choose another spec.output.uri"
    )


ACCEPTED = ("Accepted", "True", "Accepted")


def status(make: Any, *held: tuple[str, str, str], **fields: Any) -> dict[str, Any]:
    return {"conditions": [make.condition(*one) for one in held], **fields}


def test_who_was_accepted_keeps_the_place_against_an_older_one(make: Any) -> None:
    young = make.task("young", age=1, output={"uri": "s3://a/x"}, status=status(make, ACCEPTED))
    old = make.task("old", age=99, output={"uri": "s3://a/x"})
    assert refused(make, old, young) == {"team-a/old"}


@pytest.mark.parametrize(
    ("story", "ended", "in_use"),
    [
        ("its adapter lies there", ("Succeeded", "True", "AdapterUploaded"), True),
        ("it left nothing to keep", ("Failed", "True", "InvalidRow"), False),
    ],
)
def test_what_a_finished_task_holds(make: Any, story: str, ended: tuple[str, str, str], in_use: bool) -> None:
    done = make.task("done", output={"uri": "s3://a/x"}, status=status(make, ACCEPTED, ended))
    new = make.task("new", age=1, output={"uri": "s3://a/x"})
    assert bool(refused(make, done, new)) is in_use, story
    gone = replace(done, deleting=True)
    assert not refused(make, gone, new)


def test_a_task_that_nobody_serves_holds_nothing(make: Any) -> None:
    lost = make.task("lost", age=9, baseModel="Org/Typo", output={"uri": "s3://a/x"})
    assert not refused(make, lost, make.task("new", age=1, output={"uri": "s3://a/x"}))


@pytest.mark.parametrize(
    ("started", "refusals"), [(None, {"team-a/held"}), ("2026-03-01T11:00:00Z", {"team-a/new"})]
)
def test_a_suspended_task_holds_its_place_only_once_it_has_started(
    make: Any, started: str | None, refusals: set[str]
) -> None:
    fields = {"startTime": started} if started is not None else {}
    where = {"output": {"uri": "s3://adapters/x"}, "suspend": True}
    held = make.task("held", age=99, status=status(make, ACCEPTED, **fields), **where)
    new = make.task("new", age=1, output={"uri": "s3://adapters/x/new"})
    assert refused(make, held, new) == refused(make, new, held) == refusals
    assert not refused(make, held)


def test_of_suspended_ones_that_are_resumed_together_the_older_gets_the_place(make: Any) -> None:
    """Neither held it, so both had been accepted; both would train, and write to one place."""
    waited = status(make, ACCEPTED, ("Admitted", "False", "Suspended"))
    both = [
        make.task(name, age=age, output={"uri": "s3://adapters/x/y"}, status=waited)
        for name, age in (("young", 1), ("old", 99))
    ]
    assert refused(make, *both) == {"team-a/young"}
    assert not refused(make, both[0])
    queued = make.task("queued", age=0, output={"uri": "s3://adapters/x"}, status=status(make, ACCEPTED))
    assert refused(make, *both, queued) == {"team-a/young", "team-a/old"}


def test_two_that_train_already_are_left_in_peace(make: Any) -> None:
    contact = Contact(report=make.report(make.reported("Training", "a"), make.reported("Training", "b")))
    both = [
        make.task(
            name, output={"uri": "s3://a/x"}, status=status(make, ACCEPTED, ("Running", "True", "Training"))
        )
        for name in "ab"
    ]
    assert not refused(make, *both, contact=contact, group=make.group())


@pytest.mark.parametrize(
    ("story", "output", "in_use"),
    [
        ("among the checkpoints", "s3://ckpt/p/q/x", True),
        ("above the checkpoints", "s3://ckpt/p", True),
        ("in the model's folder", "s3://models/some/toy/mine", True),
        ("over the model", "s3://models/some/toy", True),
        ("above the model only", "s3://models/some", False),
    ],
)
def test_nobody_writes_where_a_pipeline_keeps_its_own(
    make: Any, story: str, output: str, in_use: bool
) -> None:
    pipeline = make.pipeline(checkpoints={"uri": "s3://ckpt/p/q/"}, model={"uri": "s3://models/some/toy"})
    assert bool(refused(make, make.task(output={"uri": output}), pipelines=(pipeline,))) is in_use, story


@pytest.mark.parametrize(
    ("story", "storage", "output"),
    [
        ("the bucket in the endpoint's path", {"endpoint": f"{S3}/models"}, "s3://some/toy/mine"),
        ("in its host", {"endpoint": "http://models.s3.storage:8333"}, "s3://some/toy/mine"),
        ("the host made of bucket and endpoint", {"endpoint": "http://svc:8333", "addressing": "virtual"},
         "s3://s3.storage/models/some/toy/mine"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", ["s3://models/some/toy", f"{S3}/models/some/toy"])
def test_nobody_writes_into_a_base_model_in_any_spelling(
    make: Any, story: str, storage: Any, output: str, model: str
) -> None:
    """A store may serve the web as well."""
    pipeline = make.pipeline(model={"uri": model}, storage={"endpoint": S3})
    assert refused(make, make.task(output={"uri": output}, storage=storage), pipelines=(pipeline,)), story


@pytest.mark.parametrize(
    ("story", "namespace", "kept", "in_use"),
    [
        ("a stranger's checkpoints", "team-m", {"checkpoints": {"uri": "s3://adapters"}}, False),
        ("a stranger's model", "team-m", {"model": {"uri": "s3://adapters/t1"}}, False),
        ("its own namespace's", "team-a", {"checkpoints": {"uri": "s3://adapters"}}, True),
        ("the platform's", "mlora-system", {"checkpoints": {"uri": "s3://adapters"}}, True),
    ],
)
def test_a_pipeline_reserves_places_against_those_whom_it_may_serve(
    make: Any, story: str, namespace: str, kept: Any, in_use: bool
) -> None:
    """Whoever may make a pipeline may write any bucket into it."""
    other = make.pipeline("other", namespace, allowedNamespaces={"from": "All"}, **kept)
    found = refused(make, make.task(), pipelines=(make.pipeline(age=9999), other))
    assert bool(found) is in_use, story


@pytest.mark.parametrize(
    ("story", "dataset", "output", "in_use"),
    [
        ("the rows' own address", "s3://d/x/rows.jsonl", "s3://d/x/rows.jsonl", True),
        ("the rows are below", "s3://d/x/rows.jsonl", "s3://d/x", True),
        ("in the folder that is read", "s3://d/x", "s3://d/x/out", True),
        ("a pattern reads files alone", "s3://d/x/*.jsonl", "s3://d/x/out", False),
        ("a pattern below", "s3://d/x/*.jsonl", "s3://d/x", True),
        ("beside", "s3://d/rows", "s3://d/out", False),
        ("the web", "https://d/x", "s3://d/x", False),
    ],
)
def test_nobody_writes_over_their_own_rows(
    make: Any, story: str, dataset: str, output: str, in_use: bool
) -> None:
    task = make.task(dataset={"uri": dataset}, output={"uri": output})
    assert bool(refused(make, task)) is in_use, story


def test_the_place_is_free_once_the_other_is_gone(make: Any) -> None:
    old, young = (
        make.task(name, age=age, output={"uri": "s3://a/x"}) for name, age in (("old", 9), ("young", 1))
    )
    held = decide(make.snapshot(old, young), make.settings(), make.now).task_statuses[Key("team-a", "young")]
    again = replace(young, status=held)
    assert answers(make, again)["team-a/young"][0] == "Accepted"


@pytest.mark.parametrize(("parts", "accepted"), [(32, True), (33, False), (500, False)])
def test_a_folder_that_is_very_deep_is_refused(make: Any, parts: int, accepted: bool) -> None:
    """Each folder above it is looked up in each pass: hundreds of such tasks took seconds of every pass."""
    task = make.task("deep", output={"uri": "s3://" + "/".join(["b" * 3] + ["a"] * (parts - 1))})
    reason, message = answers(make, task)["team-a/deep"]
    assert reason == ("Accepted" if accepted else "InvalidSpec")
    assert accepted or f"spec.output.uri: it has {parts} levels of folders" in message
