"""The two CRDs in a real API server: what it refuses and with which words, what it fills in, what it shows."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.command import CommandFailed
from tests.fixtures.kubectl import Kubectl

pytestmark = pytest.mark.integration

Judge = Callable[[dict[str, Any]], str]

CRDS = Path(__file__).parents[2] / "crds"
RELEASES = Path(__file__).parents[1] / "fixtures" / "releases"
FORMER = sorted(RELEASES.glob("*/*.yaml"))
SUSPENDED: dict[str, dict[str, Any]] = {"LoRATask": {"suspend": True}, "LoRAPipeline": {}}

TASK: dict[str, Any] = {
    "apiVersion": "mlora.dev/v1alpha1",
    "kind": "LoRATask",
    "metadata": {"name": "a"},
    "spec": {
        "baseModel": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "dataset": {"uri": "s3://datasets/gsm8k/train.jsonl"},
        "output": {"uri": "s3://adapters/a"},
        "suspend": True,  # nobody trains it, whoever else uses the cluster
    },
}
PIPELINE: dict[str, Any] = {
    "apiVersion": "mlora.dev/v1alpha1",
    "kind": "LoRAPipeline",
    "metadata": {"name": "p"},
    "spec": {"model": {"name": "m", "uri": "s3://models/m"}},
}


@pytest.fixture(scope="module")
def _installed(kubectl: Kubectl) -> None:
    # By the server, as Helm does: the last-applied annotation would not hold a schema of this size.
    kubectl("apply", "--server-side", "--force-conflicts", "--filename", str(CRDS))
    kubectl("wait", "--for=condition=Established", "--timeout=60s", "--filename", str(CRDS))
    # What the API server offers follows a little later when they were not there before.
    deadline = time.monotonic() + 30
    listed = ("api-resources", "--api-group=mlora.dev", "--cached=false", "--output=name")
    while not {"loratasks.mlora.dev", "lorapipelines.mlora.dev"} <= set(kubectl(*listed).split()):
        assert time.monotonic() < deadline, "the API server does not list both kinds"
        time.sleep(0.5)


@pytest.fixture
def inside(_installed: None, kubectl: Kubectl, namespace: str) -> Kubectl:
    """kubectl in this test's namespace, with the CRDs there."""
    return kubectl.within(namespace)


@pytest.fixture
def judge(_installed: None, kubectl: Kubectl) -> Judge:
    """``judge(manifest)`` asks the API server whether it would create it; nothing is created."""

    def ask(manifest: dict[str, Any]) -> str:
        arguments = ("create", "--namespace=default", "--dry-run=server", "--filename", "-")
        return kubectl(*arguments, stdin=json.dumps(manifest))

    return ask


def changed(manifest: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    manifest = copy.deepcopy(manifest)
    *parents, last = path.split(".")
    place = manifest["spec"]
    for name in parents:
        place = place.setdefault(name, {})
    if value is None:
        place.pop(last, None)
    else:
        place[last] = value
    return manifest


def test_the_schemas_are_structural_and_every_rule_compiles(inside: Kubectl) -> None:
    for file in CRDS.glob("*.yaml"):
        found = inside.json("get", "--filename", str(file))
        states = {one["type"]: one["status"] for one in found["status"]["conditions"]}
        assert states["NamesAccepted"] == states["Established"] == "True"
        assert states.get("NonStructuralSchema", "False") == "False"


def test_defaults_are_filled_in_everywhere(inside: Kubectl) -> None:
    inside.apply(TASK, PIPELINE)
    spec = inside.json("get", "loratask", "a")["spec"]
    usual = {"rank": 16, "alpha": 32, "dropout": 0, "targetModules": ["all-linear"]}
    assert usual.items() <= spec["lora"].items()
    assert spec["training"]["learningRate"] == 0.0002
    assert spec["dataset"]["fields"]["prompt"] == "prompt"
    assert spec["priority"] == 0
    assert spec["training"].keys().isdisjoint({"maxSteps", "maxSeqLength", "warmupRatio", "optimizer"})
    assert "secretRef" not in spec["storage"]
    spec = inside.json("get", "lorapipeline", "p")["spec"]
    assert spec["allowedNamespaces"] == {"from": "Same"}
    assert spec["idleTimeout"] == "10m"


@pytest.mark.parametrize("path", FORMER, ids=lambda path: str(path.relative_to(RELEASES)))
def test_what_users_wrote_for_a_release_is_taken(inside: Kubectl, path: Path) -> None:
    ours = [one for one in yaml.safe_load_all(path.read_text()) if one["apiVersion"].startswith("mlora.dev/")]
    assert ours
    for one in ours:
        metadata = {"name": one["metadata"]["name"]}
        inside.apply({**one, "metadata": metadata, "spec": one["spec"] | SUSPENDED[one["kind"]]})


def test_pod_fields_are_stored_as_they_are(inside: Kubectl) -> None:
    term = {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["a100"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    affinity = {"nodeAffinity": required}
    inside.apply(
        changed(PIPELINE, "worker", {"affinity": affinity, "volumes": [{"name": "x", "emptyDir": {}}]})
    )
    worker = inside.json("get", "lorapipeline", "p")["spec"]["worker"]
    assert worker["affinity"] == affinity
    assert worker["volumes"] == [{"name": "x", "emptyDir": {}}]


BAD: list[tuple[dict[str, Any], str, Any, str]] = [
    (PIPELINE, "worker.affinity.nodeAffinty", {}, "nodeAffinty"),
    (PIPELINE, "worker.resources.limit", {}, "limit"),
    (PIPELINE, "worker.tolerations", [{"operater": "Exists"}], "operater"),
    (PIPELINE, "worker.env", [{"nmae": "A"}], "nmae"),
    (PIPELINE, "memory.budget", 0, "spec.memory.budget"),
    (PIPELINE, "memory.budget", "20 GB", "spec.memory.budget"),
    (
        changed(TASK, "dataset.format", "messages"),
        "dataset.fields.text",
        "body",
        "fields.text applies only to format text",
    ),
    (TASK, "storage.secretRef.name", "../../other/secrets/keys", "spec.storage.secretRef.name"),
    (TASK, "storage.secretRef.name", "a/b", "spec.storage.secretRef.name"),
    (TASK, "training.learningRate", "1e-4", "spec.training.learningRate"),
    (TASK, "training.learningRate", 0, "spec.training.learningRate"),
    (TASK, "training.maxSteps", "1000000", "spec.training.maxSteps"),
    (TASK, "training.maxSteps", 1.5, "spec.training.maxSteps"),
    (TASK, "training.batchSize", 0, "spec.training.batchSize"),
    (TASK, "training.schedule", "cosin", "spec.training.schedule"),
    (TASK, "training.learningrate", 0.1, "learningrate"),
    (TASK, "lora.rank", 0, "spec.lora.rank"),
    (TASK, "lora.rank", True, "spec.lora.rank"),
    (TASK, "lora.alpha", 0, "spec.lora.alpha"),
    (TASK, "lora.alpha", -16, "spec.lora.alpha"),
    (TASK, "lora.dropout", 1, "spec.lora.dropout"),
    (TASK, "lora.targetModules", [], "targetModules must name modules"),
    (TASK, "lora.targetModules", ["q_proj", "all-linear"], "must be the only entry of targetModules"),
    (TASK, "dataset.uri", "/tmp/x", "spec.dataset.uri"),
    (TASK, "output.uri", "adapters/x", "must be an address such as s3://bucket/prefix"),
    (TASK, "output.uri", "s3://adapters", "must name a prefix below the bucket"),
    (TASK, "output.uri", "s3://adapters//", "must name a prefix below the bucket"),
    (TASK, "storage.endpoint", "s3:8333", "must be a URL such as"),
    (TASK, "startDeadlineSeconds", 0, "spec.startDeadlineSeconds"),
    (TASK, "ttlSecondsAfterFinished", -1, "spec.ttlSecondsAfterFinished"),
    (TASK, "dataset.uri", None, "exactly one of uri, uris, inline and configMapRef must be set"),
    (TASK, "dataset.inline", "{}", "exactly one of uri, uris, inline and configMapRef must be set"),
    (TASK, "dataset", None, "dataset"),
    (TASK, "baseModel", None, "baseModel"),
    (TASK, "training", {"warmupRatio": 0.1, "warmupSteps": 6}, "only one of warmupSteps and warmupRatio"),
    (TASK, "training", {"maxSteps": 5, "warmupSteps": 6}, "warmupSteps must not be more than maxSteps"),
    (TASK, "storage.secretRef", {}, "spec.storage.secretRef"),
    (PIPELINE, "stages", 0, "spec.stages"),
    (PIPELINE, "model.dtype", "int8", "spec.model.dtype"),
    (PIPELINE, "memory.budget", "20 Gi", "must be an amount of bytes above 0, such as 20Gi"),
    (PIPELINE, "memory.budget", "500m", "must be an amount of bytes above 0, such as 20Gi"),
    (PIPELINE, "idleTimeout", "soon", "spec.idleTimeout"),
    (PIPELINE, "idleTimeout", "soon", "must be a duration such as 90s, 10m or 1h30m"),
    (PIPELINE, "namespaceLimits.training", 0, "spec.namespaceLimits.training"),
    (PIPELINE, "allowedNamespaces", {"from": "Selector"}, "needs at least one label in selector"),
    (PIPELINE, "allowedNamespaces", {"selector": {"a": "b"}}, "requires from: Selector"),
]


@pytest.mark.parametrize(("manifest", "path", "value", "words"), BAD, ids=[f"{b[1]}={b[2]}" for b in BAD])
def test_a_bad_spec_is_refused_with_the_field_or_what_to_do(
    judge: Judge, manifest: dict[str, Any], path: str, value: Any, words: str
) -> None:
    with pytest.raises(CommandFailed) as refused:
        judge(changed(manifest, path, value))
    assert words in str(refused.value)


def test_a_python_client_is_refused_the_same_text_as_number(inside: Kubectl) -> None:
    """No kubectl and no strict validation in between: the API server itself knows the types."""
    body = json.dumps(changed(TASK, "training.learningRate", "1e-4"))
    namespace = inside.namespace
    path = f"/apis/mlora.dev/v1alpha1/namespaces/{namespace}/loratasks"
    with pytest.raises(CommandFailed, match=r"spec\.training\.learningRate"):
        inside("create", "--raw", path, "--filename", "-", stdin=body)


def test_numbers_of_yaml_arrive_as_numbers(inside: Kubectl) -> None:
    text = """
apiVersion: mlora.dev/v1alpha1
kind: LoRATask
metadata: {name: a}
spec:
  suspend: true
  baseModel: m
  dataset: {uri: s3://d/a}
  output: {uri: s3://o/a}
  training: {learningRate: 1e-4, maxSteps: 1e+06}
"""
    inside("apply", "--filename", "-", stdin=text)
    training = inside.json("get", "loratask", "a")["spec"]["training"]
    assert training["learningRate"] == 0.0001
    assert training["maxSteps"] == 1_000_000
    assert isinstance(training["maxSteps"], int)


def test_what_a_task_trains_cannot_be_changed(inside: Kubectl) -> None:
    inside.apply(TASK)
    changes: dict[str, Any] = {
        "baseModel": "other",
        "lora.rank": 8,
        "dataset.uri": "s3://datasets/other",
        "training.learningRate": 0.1,
        "output.uri": "s3://adapters/b",
        "storage.endpoint": "http://other:1",
    }
    for path, value in changes.items():
        with pytest.raises(CommandFailed) as refused:
            inside.apply(changed(TASK, path, value))
        field = path.split(".")[0]
        assert f"spec.{field}" in str(refused.value)
        assert f"{field} cannot be changed; delete the task" in str(refused.value)


def test_of_the_output_what_may_be_replaced_can_be_changed_and_nothing_else(inside: Kubectl) -> None:
    inside.apply(TASK)
    patch = {"spec": {"output": {"overwrite": True}}}
    inside("patch", "loratask", "a", "--type=merge", "--patch", json.dumps(patch))
    assert inside.json("get", "loratask", "a")["spec"]["output"]["overwrite"] is True
    for field, value in (("dtype", "float16"), ("baseModelName", "b"), ("uri", "s3://adapters/b")):
        with pytest.raises(CommandFailed, match="output cannot be changed"):
            inside.apply(changed(TASK, f"output.{field}", value))


def test_priority_and_suspend_can_be_changed_also_once_there_is_a_status(inside: Kubectl) -> None:
    inside.apply(TASK)
    status = {"status": {"state": "Training", "step": 3}}
    inside("patch", "loratask", "a", "--subresource=status", "--type=merge", "--patch", json.dumps(status))
    patch = {"spec": {"priority": 7, "suspend": False}}
    inside("patch", "loratask", "a", "--type=merge", "--patch", json.dumps(patch))
    inside.apply(changed(TASK, "priority", -5))
    spec = inside.json("get", "loratask", "a")["spec"]
    assert (spec["priority"], spec["suspend"]) == (-5, True)


def test_applying_the_same_again_changes_nothing(inside: Kubectl) -> None:
    inside.apply(TASK)
    assert "unchanged" in inside.apply(TASK)


def test_users_cannot_write_a_status_with_the_spec(inside: Kubectl) -> None:
    inside.apply(TASK | {"status": {"state": "Succeeded"}})
    assert "status" not in inside.json("get", "loratask", "a")


def test_kubectl_get_shows_what_matters(inside: Kubectl) -> None:
    inside.apply(changed(TASK, "priority", 7))
    status = {
        "state": "Failed",
        "reason": "InvalidRow",
        "progress": "3/12",
        "loss": "1.2345",
        "tokensPerSecond": "812",
        "eta": "3m20s",
        "pipeline": "ns/p",
    }
    patch = json.dumps({"status": status})
    inside("patch", "loratask", "a", "--subresource=status", "--type=merge", "--patch", patch)
    header, line = inside("get", "lt").splitlines()
    assert header.split() == ["NAME", "STATE", "REASON", "PRIORITY", "PROGRESS", "LOSS", "ETA", "AGE"]
    assert line.split()[:7] == ["a", "Failed", "InvalidRow", "7", "3/12", "1.2345", "3m20s"]
    wide = inside("get", "lt", "--output", "wide").splitlines()[0].split()
    assert wide == [*header.split()[:-1], "BASE", "MODEL", "PIPELINE", "TOKENS/S", "ADAPTER", "AGE"]


def test_short_names_and_the_category_work(inside: Kubectl) -> None:
    inside.apply(TASK, PIPELINE)
    assert "loratask.mlora.dev/a" in inside("get", "mlora", "--output", "name")
    assert "lorapipeline.mlora.dev/p" in inside("get", "mlora", "--output", "name")
    assert inside("get", "lp", "p", "--output", "name").strip() == "lorapipeline.mlora.dev/p"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("loratask", "One LoRA adapter to train"),
        ("loratask.spec.lora.rank", "A larger rank makes a larger adapter"),
        ("loratask.spec.training", "learningRate"),
        ("loratask.status.conditions", "observedGeneration"),
        ("lorapipeline.spec.worker.tolerations", "As in a pod"),
    ],
)
@pytest.mark.usefixtures("_installed")
def test_kubectl_explain_reads_well(kubectl: Kubectl, path: str, words: str) -> None:
    assert words in " ".join(kubectl("explain", path).split())


def test_a_condition_can_be_waited_for(inside: Kubectl) -> None:
    inside.apply(TASK)
    condition = {
        "type": "Succeeded",
        "status": "True",
        "reason": "AdapterUploaded",
        "message": "",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    patch = json.dumps({"status": {"conditions": [condition]}})
    inside("patch", "loratask", "a", "--subresource=status", "--type=merge", "--patch", patch)
    inside("wait", "loratask/a", "--for=condition=Succeeded", "--timeout=10s")
