"""Raw objects become nouns; what is wrong becomes a problem that names the field."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.reconcile.state.decode import (
    Reader,
    namespaces_wanted,
    read_pipeline,
    read_task,
    secrets_wanted,
)
from mlora_operator.reconcile.state.snapshot import Key


def test_a_valid_task_has_a_spec_and_no_problem(make: Any) -> None:
    task = read_task(make.raw_task(priority=3), allow_file_uris=False)
    assert task.problem is None
    assert task.spec is not None
    assert (task.key, task.spec.priority, task.uid) == (Key("team-a", "t1"), 3, "uid-team-a-t1")


@pytest.mark.parametrize(
    ("story", "spec", "field"),
    [
        ("a number as text", {"training": {"learningRate": "1e-4"}}, "spec.training.learningRate"),
        ("a boolean as a number", {"lora": {"rank": True}}, "spec.lora.rank"),
        ("no learning at all", {"lora": {"alpha": 0}}, "spec.lora.alpha"),
        ("two sources of rows", {"dataset": {"inline": "{}"}}, "spec.dataset"),
        ("all-linear beside a name", {"lora": {"targetModules": ["all-linear", "q_proj"]}}, "spec.lora"),
        ("a file in a cluster", {"dataset": {"uri": "file:///rows.jsonl"}}, "spec.dataset.uri"),
        (
            "rows to evaluate on as a file",
            {"evaluation": {"uri": "file:///rows.jsonl"}},
            "spec.evaluation.uri",
        ),
        ("a start from a file", {"initFrom": {"uri": "file:///adapter"}}, "spec.initFrom.uri"),
        ("an adapter as a file in a cluster", {"output": {"uri": "file:///out"}}, "spec.output.uri"),
    ],
)
def test_a_wrong_field_is_named(make: Any, story: str, spec: dict[str, Any], field: str) -> None:
    task = read_task(make.raw_task(**spec), allow_file_uris=False)
    assert task.spec is None, story
    assert task.problem is not None
    assert task.problem.startswith(field), task.problem


def test_files_are_allowed_where_the_settings_say_so(make: Any) -> None:
    raw = make.raw_task(dataset={"uri": "file:///rows.jsonl"}, output={"uri": "file:///out"})
    assert read_task(raw, allow_file_uris=True).problem is None


def test_fields_that_only_a_newer_schema_knows_are_passed_over(make: Any) -> None:
    """The API server fills in their defaults, also in objects that were there before."""
    raw = make.raw_task(newer=0, lora={"rank": 4, "newer": {"a": 1}})
    task = read_task(raw, allow_file_uris=False)
    assert (task.problem, task.spec and task.spec.lora.rank) == (None, 4)
    pipeline = read_pipeline(make.raw_pipeline(newer=False, model={"newer": "x"}))
    assert (pipeline.problem, pipeline.spec and pipeline.spec.stages) == (None, 2)


def test_a_wrong_pipeline_is_named_too(make: Any) -> None:
    found = read_pipeline(make.raw_pipeline(allowedNamespaces={"from": "Selector"}))
    assert found.spec is None
    assert found.problem is not None
    assert "needs at least one label" in found.problem


@pytest.mark.parametrize("status", [{"conditions": "?"}, {"step": "many"}, None])
def test_a_status_that_cannot_be_read_counts_as_empty(make: Any, status: Any) -> None:
    raw = {**make.raw_task(), "status": status}
    assert read_task(raw, allow_file_uris=False).status.conditions == ()


def test_a_status_of_a_newer_operator_is_read_as_far_as_it_is_known(make: Any) -> None:
    raw = make.raw_task(status={"step": 7, "somethingNew": {"a": 1}})
    assert read_task(raw, allow_file_uris=False).status.step == 7


@pytest.mark.parametrize(
    ("conditions", "finished"),
    [
        ([], False),
        ([("Running", "True")], False),
        ([("Succeeded", "False")], False),
        ([("Failed", "True")], True),
    ],
)
def test_a_task_is_finished_when_its_status_says_so(make: Any, conditions: Any, finished: bool) -> None:
    status = {"conditions": [make.condition(*one) for one in conditions]}
    assert make.task(status=status).finished is finished


def test_only_secrets_that_still_matter_are_read(make: Any) -> None:
    done = {"conditions": [make.condition("Succeeded", "True")]}
    tasks = [
        make.task("a", storage={"secretRef": {"name": "keys"}}),
        make.task("b", storage={"secretRef": {"name": "old"}}, status=done),
        make.task("c"),
    ]
    pipelines = [make.pipeline(storage={"secretRef": {"name": "models"}})]
    assert secrets_wanted(tasks, pipelines) == {Key("team-a", "keys"), Key("team-a", "models")}


def test_labels_of_namespaces_are_read_only_for_a_selector(make: Any) -> None:
    selecting = make.pipeline(allowedNamespaces={"from": "Selector", "selector": {"gpu": "yes"}})
    tasks = [make.task(namespace="a"), make.task(namespace="b", baseModel="Other/Model")]
    assert namespaces_wanted(tasks, [selecting]) == {"a"}
    assert namespaces_wanted(tasks, [make.pipeline()]) == frozenset()


def test_an_object_is_parsed_again_only_when_its_version_changed(make: Any) -> None:
    reader = Reader(allow_file_uris=False)
    raw = make.raw_task()
    first = reader.task(raw)
    assert reader.task(raw) is first
    raw["metadata"]["resourceVersion"] = "2"
    assert reader.task(raw) is not first
    reader.keep_only({"uid-of-another"})
    assert reader.task(raw) is not first


def test_objects_without_versions_are_parsed_each_time(make: Any) -> None:
    reader = Reader(allow_file_uris=False)
    raw = make.raw_task()
    del raw["metadata"]["resourceVersion"]
    assert reader.task(raw) is not reader.task(raw)


def test_a_spec_is_parsed_again_only_when_its_generation_changed(make: Any) -> None:
    reader = Reader(allow_file_uris=False)

    def version(number: int, generation: int, priority: int) -> dict[str, Any]:
        raw = make.raw_task(priority=priority)
        told = {"resourceVersion": str(number), "generation": generation}
        return {**raw, "metadata": {**raw["metadata"], **told}, "status": {"step": number}}

    first = reader.task(version(1, 1, priority=3))
    second = reader.task(version(2, 1, priority=3))
    assert (second.status.step, second.spec is first.spec) == (2, True)
    third = reader.task(version(3, 2, priority=4))
    assert third.spec is not None
    assert (third.status.step, third.spec.priority) == (3, 4)
