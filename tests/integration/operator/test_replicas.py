"""A pipeline with many tasks has replicas, each with workers of its own, and they go again."""

from __future__ import annotations

from collections import Counter

import pytest

from mlora_worker.protocol import TaskPhase
from tests.integration.operator.conftest import MODEL, Bench

pytestmark = pytest.mark.integration

HEAD, REPLICA = "wide", "wide-replica-1"
TASKS = [f"t{number}" for number in range(5)]


def test_many_tasks_are_shared_with_a_replica_that_goes_when_they_are_done(bench: Bench) -> None:
    second = bench.coordinator.beside(REPLICA)
    coordinators = (bench.coordinator, second)
    for one in coordinators:
        one.hold = TaskPhase.TRAINING
    bench.kubectl.apply(
        {
            "apiVersion": "mlora.dev/v1alpha1",
            "kind": "LoRAPipeline",
            "metadata": {"name": HEAD},
            "spec": {
                "model": {"name": MODEL, "uri": "s3://models/toy"},
                "stages": 2,
                "replicas": {"max": 2, "tasksPerReplica": 2},
                "idleTimeout": "2s",
                "worker": {"nodeSelector": {"nowhere": "yes"}},
            },
        }
    )
    for name in TASKS:
        bench.apply(name)
    bench.until(lambda: pipelines(bench) == {HEAD, REPLICA}, "a replica is there")
    bench.until(lambda: sum(len(one.known) for one in coordinators) == len(TASKS), "all tasks are planned")
    bench.until(lambda: min(len(one.known) for one in coordinators) >= 2, "both have their share")
    groups = bench.kubectl.json("get", "statefulsets")["items"]
    assert {one["metadata"]["ownerReferences"][0]["name"] for one in groups} == {HEAD, REPLICA}
    bench.until(lambda: bench.status("lorapipeline", HEAD).get("members") == 2, "the status says so")
    for one in coordinators:
        bench.until(lambda one=one: TaskPhase.TRAINING in one.known.values(), "both train")

    for one in coordinators:
        one.hold = None
    for name in TASKS:
        bench.until(lambda name=name: bench.condition(name, "Succeeded")[0] == "True", f"{name} is done")
    uploads = Counter(bench.coordinator.uploads) + Counter(second.uploads)
    assert uploads == dict.fromkeys(TASKS, 1), "each was trained once, at one of them"
    assert second.uploads
    bench.until(lambda: pipelines(bench) == {HEAD}, "the replica is gone", 40)
    bench.until(lambda: bench.status("lorapipeline", HEAD).get("members") == 1, "the status says so")
    bench.until(
        lambda: len(bench.kubectl.json("get", "statefulsets")["items"]) == 1, "so are its workers", 60
    )


def pipelines(bench: Bench) -> set[str]:
    return {one["metadata"]["name"] for one in bench.kubectl.json("get", "lorapipelines")["items"]}
