"""What real pods of real StatefulSets make necessary: all of a group or none, and an end that stays one."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mlora_operator.manifests.names import LABEL_PIPELINE, catalogue_name
from mlora_worker.protocol import TaskPhase
from tests.integration.operator.conftest import OTHER_MODEL, THIRD_MODEL, Bench

pytestmark = pytest.mark.integration


def pods_of(bench: Bench, model: str | None = None) -> list[dict[str, Any]]:
    """Worker pods that are not ending, of one model's pipeline or of all."""
    items = bench.kubectl.json("get", "pods")["items"]
    there = [one for one in items if "deletionTimestamp" not in one["metadata"]]
    if model is None:
        return there
    return [one for one in there if one["metadata"]["labels"][LABEL_PIPELINE] == catalogue_name(model)]


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True"


def test_a_finished_task_stays_finished_whatever_becomes_of_its_workers(bench_with_pods: Bench) -> None:
    bench = bench_with_pods
    bench.apply(training={"maxSteps": 3})
    bench.until(
        lambda: [is_ready(pod) for pod in pods_of(bench)] == [True, True], "both workers are ready", 60
    )
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=60s", "loratask/t1")
    done = bench.kubectl.json("get", "loratask", "t1")
    assert (bench.coordinator.steps, bench.coordinator.uploads) == ({"t1": 3}, ["t1"])
    bench.until(lambda: bench.kubectl.json("get", "pods")["items"] == [], "no pod is left", 60)
    pipeline = bench.pipeline()
    bench.until(lambda: bench.status("lorapipeline", pipeline)["state"] == "Idle", "it says so")

    group = bench.child("statefulset")
    bench.kubectl("delete", "statefulset", group["metadata"]["name"])
    sent = len(bench.coordinator.plans)
    assert bench.operator.stop() == 0
    bench.operator.start()
    for _ in range(4):
        time.sleep(3)
        assert bench.kubectl.json("get", "statefulsets,pods")["items"] == []
    assert bench.kubectl.json("get", "loratask", "t1") == done, "not a word of it was written again"
    assert not [task for plan in bench.coordinator.plans[sent:] for task in plan.tasks]
    assert (bench.coordinator.steps, bench.coordinator.uploads) == ({"t1": 3}, ["t1"])

    # The workers of another task know nothing of it; their group is deleted under them, at its end.
    bench.apply("t2", training={"maxSteps": 3})
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=60s", "loratask/t2")
    bench.kubectl("delete", "statefulset", group["metadata"]["name"])
    bench.until(lambda: bench.kubectl.json("get", "pods,statefulsets")["items"] == [], "all is gone", 60)
    assert (bench.coordinator.steps, bench.coordinator.uploads) == ({"t1": 3, "t2": 3}, ["t1", "t2"])


def test_half_a_group_under_a_quota_gives_back_and_starts_by_itself_when_the_other_ends(
    bench_with_pods: Bench,
) -> None:
    bench = bench_with_pods
    first, second = (bench.coordinator.beside(catalogue_name(one)) for one in (OTHER_MODEL, THIRD_MODEL))
    first.hold, second.is_there = TaskPhase.TRAINING, False
    quota = {"metadata": {"name": "three"}, "spec": {"hard": {"pods": "3"}}}
    bench.kubectl.create({"apiVersion": "v1", "kind": "ResourceQuota", **quota})
    bench.until(
        lambda: bench.kubectl.json("get", "resourcequota", "three").get("status", {}).get("hard"),
        "the quota is in force",
    )
    bench.apply("t1", baseModel=OTHER_MODEL)
    bench.until(lambda: bench.status("loratask", "t1").get("state") == "Training", "t1 trains", 60)
    bench.until(lambda: [is_ready(pod) for pod in pods_of(bench, OTHER_MODEL)] == [True, True], "it is whole")

    bench.apply("t2", baseModel=THIRD_MODEL)
    name = catalogue_name(THIRD_MODEL)
    bench.until(lambda: len(pods_of(bench, THIRD_MODEL)) == 1, "one of two pods is let in")
    bench.until(
        lambda: bench.condition("t2", "Admitted")[1] == "WaitingForWorkers", "its task waits for workers", 60
    )
    assert bench.status("loratask", "t2")["state"] == "Queued"
    assert "exceeded quota: three" in bench.condition("t2", "Admitted")[2]
    assert bench.status("lorapipeline", name)["state"] == "Waiting"
    assert bench.condition(name, "Ready", "lorapipeline")[1] == "WorkersIncomplete"
    bench.until(lambda: pods_of(bench, THIRD_MODEL) == [], "what it had is given back")
    time.sleep(6)
    assert pods_of(bench, THIRD_MODEL) == [], "it does not take it again at once"
    assert len(pods_of(bench, OTHER_MODEL)) == 2, "nobody else suffers"

    bench.operator.stop()
    bench.operator.start()
    time.sleep(6)
    assert pods_of(bench, THIRD_MODEL) == [], "a restarted operator remembers"
    assert bench.status("lorapipeline", name)["start"]["attempts"] == 1

    first.hold = None
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=30s", "loratask/t1")
    # Nobody wants the first group, and its idleTimeout is an hour: it goes since the other one lacks its place.
    bench.until(
        lambda: [is_ready(pod) for pod in pods_of(bench, THIRD_MODEL)] == [True, True],
        "it starts again automatically",
        60,
    )
    second.is_there = True
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=60s", "loratask/t2")
    for model in (OTHER_MODEL, THIRD_MODEL):
        status = bench.status("lorapipeline", catalogue_name(model))
        assert (status.get("restarts"), status.get("start")) == (None, None)
    for task in ("t1", "t2"):
        assert bench.status("loratask", task).get("restarts") is None
