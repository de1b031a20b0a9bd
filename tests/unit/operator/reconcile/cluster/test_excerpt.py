"""What is kept of an object."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlora_operator.api.spec_size import LARGEST_SPEC
from mlora_operator.manifests.names import ANNOTATION_PIPELINE, LABEL_PIPELINE, LINEAGE, REVISION, SCHEME
from mlora_operator.reconcile.cluster.excerpt import excerpt
from mlora_operator.reconcile.state.decode import read_pipeline, read_task
from mlora_operator.reconcile.state.pods import read_groups

TASK = {
    "baseModel": "toy",
    "dataset": {"uri": "s3://rows/train.jsonl", "format": "messages"},
    "output": {"uri": "s3://adapters/a"},
}
META = {
    "uid": "u",
    "name": "mlora-toy",
    "namespace": "a",
    "resourceVersion": "3",
    "generation": 2,
    "creationTimestamp": "2026-11-29T12:00:00Z",
}
FAT = {
    "managedFields": [{"manager": "kubectl"}] * 1000,
    "finalizers": [f"example.com/{number}" for number in range(4000)],
    "ownerReferences": [{"kind": "LoRAPipeline", "uid": "p", "name": "x" * 200}] * 4000,
    "labels": {LABEL_PIPELINE: "toy", **{f"l{number}": "v" * 63 for number in range(3000)}},
    "annotations": {
        "x": "y" * 250_000,
        ANNOTATION_PIPELINE: "toy",
        REVISION: "r",
        LINEAGE: "l",
        SCHEME: "https",
        "mlora.dev/retry": "again" * 10_000,
        "mlora.dev/replica-of": "toy",
        "mlora.dev/replica-number": "2",
        "mlora.dev/replica-hash": "h",
        "mlora.dev/catalogue-hash": "c",
    },
}
CONTAINER = {
    "name": "n" * 500_000,
    "restartCount": 4,
    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
    "lastState": {
        "terminated": {"exitCode": 3, "reason": "Error", "message": "lost", "containerID": "c" * 10_000}
    },
}
BODIES: dict[str, dict[str, Any]] = {
    "statefulsets": {
        "spec": {
            "replicas": 3,
            "template": {
                "metadata": {"annotations": {SCHEME: "https", "x": "y" * 99_999}},
                "spec": {"containers": ["<" * 99_999]},
            },
        },
        "status": {"observedGeneration": 2, "replicas": 1, "conditions": ["c" * 99_999]},
    },
    "services": {"spec": {"externalIPs": ["x" * 99_999]}},
    "pods": {
        "spec": {"containers": ["<" * 999_999]},
        "status": {
            "phase": "Running",
            "podIPs": ["x" * 99_999],
            "conditions": [
                {"type": "Ready", "status": "False", "lastTransitionTime": "2026-11-29T12:00:00Z"},
                {"type": "PodScheduled", "status": "True"},
            ],
            "containerStatuses": [CONTAINER],
        },
    },
    "events": {
        "involvedObject": {"kind": "StatefulSet", "namespace": "a", "name": "mlora-toy", "uid": "u"},
        "reason": "FailedCreate",
        "message": "exceeded quota",
        "lastTimestamp": "2026-11-29T12:00:00Z",
        "source": {"component": "c" * 99_999},
    },
    "loratasks": {},
    "lorapipelines": {},
}


def whole(plural: str) -> dict[str, Any]:
    name = "mlora-toy-0" if plural == "pods" else "mlora-toy"
    return {"apiVersion": "v1", "kind": "K", "metadata": {**META, **FAT, "name": name}, **BODIES[plural]}


@pytest.mark.parametrize("plural", BODIES)
def test_whatever_an_object_is_filled_with_little_is_kept(plural: str) -> None:
    given = whole(plural)
    before = json.dumps(given)
    assert len(before) > 900_000
    kept = excerpt(plural, given)
    assert len(json.dumps(kept)) < 8_000
    assert json.dumps(given) == before
    assert kept["metadata"] | META | {"name": given["metadata"]["name"]} == kept["metadata"]
    assert excerpt(plural, kept) == kept


def test_workers_read_the_same_from_it() -> None:
    kinds = ("statefulsets", "pods", "events")
    from_whole = read_groups(*([whole(plural)] for plural in kinds))
    assert from_whole == read_groups(*([excerpt(plural, whole(plural))] for plural in kinds))
    (group,) = from_whole.values()
    assert group.problem is not None
    assert group.scheme == "https"
    (pod,) = group.pods
    assert (pod.restarts, pod.revision, pod.lineage, pod.placed) == (4, "r", "l", True)
    assert pod.problem is not None
    assert "exit code 3: lost" in pod.problem.message


def test_tasks_and_pipelines_read_the_same_from_it() -> None:
    task = {**whole("loratasks"), "spec": TASK, "status": {"phase": "Training"}}
    read = read_task(excerpt("loratasks", task), allow_file_uris=False)
    assert read == read_task(task, allow_file_uris=False)
    assert read.spec is not None
    assert read.retry
    pipeline = whole("lorapipelines")
    found = read_pipeline(excerpt("lorapipelines", pipeline))
    assert found == read_pipeline(pipeline)
    assert found.catalogue_hash == "c"
    assert found.replica is not None


def test_a_spec_that_is_too_large_is_not_kept_and_is_refused_as_ever() -> None:
    spec = {**TASK, "dataset": {"inline": "x" * LARGEST_SPEC, "format": "text"}}
    kept = excerpt("loratasks", {**whole("loratasks"), "spec": spec})
    assert len(json.dumps(kept)) < 8_000
    read = read_task(kept, allow_file_uris=False)
    assert read.spec is None
    assert read.problem is not None
    assert read.problem.startswith("spec: has 524,")
    assert "put rows into a store or a ConfigMap" in read.problem
    assert excerpt("loratasks", kept) == kept


def test_kinds_that_nobody_here_reads_stay_as_they_are() -> None:
    given = whole("services")
    assert excerpt("customresourcedefinitions", given) == given
