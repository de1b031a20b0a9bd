"""What is mistyped, or has no effect, is refused where it is written, with what was probably meant."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from mlora_operator import pod_shapes
from mlora_operator.api.pod_parts import misfit, shape
from mlora_operator.api.suggestions import unknown_field
from mlora_operator.local.manifests import read_manifests

TASK: dict[str, Any] = {
    "apiVersion": "mlora.dev/v1alpha1",
    "kind": "LoRATask",
    "metadata": {"name": "a"},
    "spec": {"baseModel": "m", "dataset": {"uri": "s3://d/a"}, "output": {"uri": "s3://a/b"}},
}
PIPELINE: dict[str, Any] = {
    "apiVersion": "mlora.dev/v1alpha1",
    "kind": "LoRAPipeline",
    "metadata": {"name": "a"},
    "spec": {"model": {"name": "m", "uri": "s3://m/m"}},
}


def problems(manifest: dict[str, Any], **spec: Any) -> list[tuple[str, str]]:
    changed = {**manifest, "spec": {**manifest["spec"], **spec}}
    return [(one.field, one.message) for one in read_manifests([("f", yaml.safe_dump(changed))]).problems]


@pytest.mark.parametrize(
    ("manifest", "spec", "field", "words"),
    [
        (TASK, {"lora": {"r": 8}}, "spec.lora.r", "did you mean rank?"),
        (TASK, {"lora": {"lora_alpha": 8}}, "spec.lora.lora_alpha", "did you mean alpha?"),
        (
            TASK,
            {"lora": {"target_modules": ["q"]}},
            "spec.lora.target_modules",
            "did you mean targetModules?",
        ),
        (TASK, {"base_model": "m"}, "spec.base_model", "did you mean baseModel?"),
        (TASK, {"training": {"batch_size": 2}}, "spec.training.batch_size", "did you mean batchSize?"),
        (
            TASK,
            {"training": {"learning_rate": 1e-4}},
            "spec.training.learning_rate",
            "did you mean learningRate?",
        ),
        (TASK, {"training": {"epoch": 2}}, "spec.training.epoch", "did you mean epochs?"),
        (TASK, {"training": {"zzz": 2}}, "spec.training.zzz", "unknown field"),
        (
            PIPELINE,
            {"worker": {"resources": {"limit": {}}}},
            "spec.worker.resources",
            "limit: unknown field; did you mean limits?",
        ),
        (
            PIPELINE,
            {"worker": {"tolerations": [{"operater": "Exists"}]}},
            "spec.worker.tolerations[0]",
            "did you mean operator?",
        ),
        (
            PIPELINE,
            {"worker": {"env": [{"nmae": "A"}]}},
            "spec.worker.env[0]",
            "nmae: unknown field; did you mean name?",
        ),
        (PIPELINE, {"worker": {"env": [{"value": "A"}]}}, "spec.worker.env[0]", "name is missing"),
        (
            PIPELINE,
            {"worker": {"env": [{"name": "A", "value": 1}]}},
            "spec.worker.env[0]",
            "value: must be text; put it in quotes",
        ),
        (
            PIPELINE,
            {"worker": {"volumes": [{"name": "v", "emptydir": {}}]}},
            "spec.worker.volumes[0]",
            "did you mean emptyDir?",
        ),
        (
            PIPELINE,
            {"worker": {"volumeMounts": [{"name": "v"}]}},
            "spec.worker.volumeMounts[0]",
            "mountPath is missing",
        ),
        (
            PIPELINE,
            {"worker": {"affinity": {"nodeAffinty": {}}}},
            "spec.worker.affinity",
            "did you mean nodeAffinity?",
        ),
        (
            PIPELINE,
            {"worker": {"resources": {"limits": {"cpu": True}}}},
            "spec.worker.resources",
            "limits.cpu: must be a quantity",
        ),
    ],
)
def test_a_field_that_there_is_not_is_named_with_its_neighbour(
    manifest: dict[str, Any], spec: dict[str, Any], field: str, words: str
) -> None:
    found = problems(manifest, **spec)
    assert any(where == field and words in told for where, told in found), found


def test_a_field_of_the_metadata_is_looked_at_too() -> None:
    text = yaml.safe_dump({**TASK, "metadata": {"name": "a", "lable": {"x": "y"}}})
    (problem,) = read_manifests([("f", text)]).problems
    assert (problem.field, problem.message) == ("metadata.lable", "unknown field; did you mean labels?")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {"uri": "s3://d/a", "format": "alpaca", "fields": {"prompt": "q"}},
            "fields.prompt applies only to format promptCompletion",
        ),
        (
            {"uri": "s3://d/a", "format": "messages", "fields": {"text": "body"}},
            "fields.text applies only to format text",
        ),
        (
            {"uri": "s3://d/a", "format": "text", "fields": {"system": "s"}},
            "fields.system applies only to format alpaca and sharegpt",
        ),
    ],
)
def test_a_column_of_another_format_is_refused(spec: dict[str, Any], words: str) -> None:
    ((field, message),) = problems(TASK, dataset=spec)
    assert field == "spec.dataset"
    assert words in message


def test_a_column_of_any_format_may_be_named_where_the_rows_tell_the_format() -> None:
    assert problems(TASK, dataset={"uri": "s3://d/a", "fields": {"text": "body"}}) == []


@pytest.mark.parametrize("column", ["q", "prompt"])
def test_columns_of_ones_own_format_may_have_any_name(column: str) -> None:
    assert problems(TASK, dataset={"uri": "s3://d/a", "fields": {"prompt": column, "weight": "w"}}) == []


@pytest.mark.parametrize("text", ["0x_", "0b_", "-0x__", "0o_"])
def test_a_number_that_is_none_is_a_problem_with_its_line_and_no_crash(text: str) -> None:
    written = yaml.safe_dump(TASK | {"spec": TASK["spec"] | {"lora": {"rank": "RANK"}}}).replace("RANK", text)
    (problem,) = read_manifests([("f", written)]).problems
    assert problem.field == "spec.lora.rank"
    assert problem.line > 1


@pytest.mark.parametrize(
    "spec",
    [
        {"memory": {"budget": 21474836480}},
        {"memory": {"budget": "20Gi"}},
        {"worker": {"modelCache": 0}},
        {"worker": {"modelCache": "0"}},
        {"worker": {"resources": {"limits": {"nvidia.com/gpu": 1, "cpu": "500m", "memory": "8Gi"}}}},
        {"worker": {"volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1Gi"}}]}},
        {"worker": {"tolerations": [{"operator": "Exists", "tolerationSeconds": None}]}},
    ],
)
def test_quantities_are_what_kubernetes_takes(spec: dict[str, Any]) -> None:
    assert problems(PIPELINE, **spec) == []


@pytest.mark.parametrize("budget", [0, -1, True, 1.5, "20 GB"])
def test_what_is_no_quantity_is_refused(budget: Any) -> None:
    assert [field for field, _ in problems(PIPELINE, memory={"budget": budget})] == ["spec.memory.budget"]


def test_the_shapes_are_those_of_the_installed_kubernetes_package() -> None:
    assert (
        json.loads(pod_shapes.written())
        == pod_shapes.shapes()
        == {name: shape(name) for name in pod_shapes.PARTS}
    )


def test_every_shape_takes_an_empty_part_or_says_what_it_lacks() -> None:
    lacking = {name: misfit({}, shape(name)) for name in pod_shapes.PARTS}
    assert {name for name, problem in lacking.items() if problem is not None} == {
        "envVar",
        "volume",
        "volumeMount",
    }


def test_a_name_that_is_near_none_is_just_unknown() -> None:
    assert unknown_field("zzz", ["rank"]) == "unknown field"
    assert unknown_field("Rank", ["rank"]) == "unknown field; did you mean rank?"
    assert unknown_field(7, ["rank"]) == "unknown field"


def test_a_field_that_is_null_is_as_if_it_were_not_there_as_for_the_api_server() -> None:
    text = """\
apiVersion: mlora.dev/v1alpha1
kind: LoRATask
metadata: {name: a}
spec:
  baseModel: m
  priority: null
  lora: {rank: null, alphaPattern: {q_proj: null}}
  dataset: {uri: s3://data/train.jsonl, fields: null}
  training: null
  output: {uri: s3://adapters/a}
"""
    assert not read_manifests([("a.yaml", text)]).problems
    for required in ("baseModel: m", "output: {uri: s3://adapters/a}"):
        name = required.partition(":")[0]
        (problem,) = read_manifests([("a.yaml", text.replace(required, f"{name}: null"))]).problems
        assert str(problem).endswith(f"spec.{name}: is missing")
