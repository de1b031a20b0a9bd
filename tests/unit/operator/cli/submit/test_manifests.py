"""What is made of a user's files before a cluster is asked."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.submit.manifests import differences, read_submission, within

TASK = """\
apiVersion: mlora.dev/v1alpha1
kind: LoRATask
metadata: {name: a}
spec: {baseModel: m, dataset: {uri: "s3://d/a"}, output: {uri: "s3://o/a/"}, training: {learningRate: 1e-4}}
"""
SPEC: dict[str, Any] = {"baseModel": "m", "dataset": {"uri": "s3://d/a"}, "output": {"uri": "s3://o/a"}}
CONFIG = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {a: b}\n"


def test_tasks_and_others_of_all_documents_and_lists_are_kept_apart() -> None:
    indented = (
        TASK.replace("name: a", "name: b").replace("s3://o/a", "s3://o/b").rstrip().replace("\n", "\n  ")
    )
    listed = f"apiVersion: v1\nkind: List\nitems:\n- {indented}\n"
    found = read_submission([("f", TASK + "---\n" + CONFIG), ("g", listed)], None, None)
    assert [one["metadata"]["name"] for one in found.tasks] == ["a", "b"]
    assert [one["kind"] for one in found.others] == ["ConfigMap"]
    assert found.tasks[0]["spec"]["training"]["learningRate"] == 0.0001


def test_what_the_server_wrote_is_left_out() -> None:
    text = TASK.replace(
        "{name: a}",
        "{name: a, uid: x, resourceVersion: '1', generation: 3, creationTimestamp: now, managedFields: [], labels: {k: v}, "
        "annotations: {kubectl.kubernetes.io/last-applied-configuration: '{}', mine: '1'}}",
    )
    (found,) = read_submission([("f", text + "status: {state: Failed}\n")], None, None).tasks
    assert found["metadata"] == {"name": "a", "labels": {"k": "v"}, "annotations": {"mine": "1"}}
    assert "status" not in found


def test_a_suffix_goes_behind_name_and_output() -> None:
    (found,) = read_submission([("f", TASK)], None, "1a2b3c").tasks
    assert found["metadata"]["name"] == "a-1a2b3c"
    assert found["spec"]["output"]["uri"] == "s3://o/a-1a2b3c"
    assert found["spec"]["dataset"]["uri"] == "s3://d/a"


@pytest.mark.parametrize(
    ("text", "namespace", "suffix", "words"),
    [
        (TASK.replace("1e-4", "-1"), None, None, "f:4: LoRATask/a spec.training.learningRate"),
        (CONFIG, None, None, "no LoRATask"),
        (TASK, None, "Feature/X", "--name-suffix Feature/X: a name can end only in lower-case"),
        (TASK, None, "x" * 253, "at most 253"),
        (
            TASK.replace("{name: a}", "{name: a, namespace: b}"),
            "c",
            None,
            "is for namespace 'b', and --namespace says 'c'",
        ),
    ],
)
def test_wrong_input_is_refused_before_anything_happens(
    text: str, namespace: str | None, suffix: str | None, words: str
) -> None:
    with pytest.raises(CommandError) as refusal:
        read_submission([("f", text)], namespace, suffix)
    assert refusal.value.exit_code == 2
    assert words in str(refusal.value)


def test_a_manifests_own_namespace_stays() -> None:
    assert within({"metadata": {"name": "a"}}, "team")["metadata"]["namespace"] == "team"
    assert within({"metadata": {"name": "a", "namespace": "b"}}, "team")["metadata"]["namespace"] == "b"


@pytest.mark.parametrize(
    ("there", "wanted", "found"),
    [
        ({}, {}, []),
        ({"lora": {"rank": 16}, "priority": 0}, {}, []),  # defaults, filled in by the server
        ({"training": {"learningRate": 0.1}}, {"training": {"learningRate": 0.2}}, ["training.learningRate"]),
        ({"lora": {"targetModules": ["a"]}}, {"lora": {"targetModules": ["a", "b"]}}, ["lora.targetModules"]),
        ({"priority": 3}, {"suspend": True}, ["priority", "suspend"]),
        ({"storage": {"secretRef": {"name": "a"}}}, {}, ["storage.secretRef"]),
    ],
)
def test_specs_are_compared_with_their_defaults(
    there: dict[str, Any], wanted: dict[str, Any], found: list[str]
) -> None:
    assert [".".join(one.path) for one in differences(SPEC | there, SPEC | wanted)] == found


def test_fields_of_a_later_crd_are_not_compared() -> None:
    served = LoRATaskSpec.model_validate(SPEC).model_dump(mode="json", by_alias=True, exclude_none=True)
    served |= {"ofALaterVersion": 1, "lora": served["lora"] | {"alsoOfOne": 2, "rank": 4}}
    assert differences(served, SPEC | {"lora": {"rank": 4}}) == []
    assert [one.path for one in differences(served, SPEC)] == [("lora", "rank")]


def test_only_what_the_api_server_lets_change_is_changeable() -> None:
    there = SPEC | {"priority": 1, "suspend": True}
    wanted = SPEC | {"lora": {"rank": 1}, "output": SPEC["output"] | {"overwrite": True, "dtype": "float16"}}
    assert {".".join(one.path): one.immutable for one in differences(there, wanted)} == {
        "lora.rank": True,
        "output.dtype": True,
        "output.overwrite": False,
        "priority": False,
        "suspend": False,
    }
