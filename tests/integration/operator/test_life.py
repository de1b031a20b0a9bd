"""A task from ``kubectl apply`` to ``Succeeded``, and what the operator leaves in the API server on the way."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest

from mlora_worker.protocol import TaskPhase

pytestmark = pytest.mark.integration


def test_a_task_of_the_catalogues_model_goes_from_apply_to_succeeded(bench: Any) -> None:
    bench.apply()
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=30s", "loratask/t1")
    status = bench.status("loratask", "t1")
    assert status["state"] == "Succeeded"
    assert (status["step"], status["totalSteps"], status["progress"]) == (4, 4, "4/4")
    assert status["adapter"] == {
        "uri": "s3://adapters/t1",
        "sha256": "ab" * 32,
        "bytes": 123,
        "maxLoraRank": 16,
    }
    assert status["startTime"] <= status["completionTime"]
    assert bench.condition("t1", "Failed")[0] == "False"

    pipeline = bench.pipeline()
    service, group = bench.child("service"), bench.child("statefulset")
    for child in (service, group):
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["controller"]) == ("LoRAPipeline", pipeline, True)
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert group["spec"]["updateStrategy"] == {"type": "OnDelete"}

    secret = bench.kubectl.json("get", "secret", f"{group['metadata']['name']}-token")
    assert bench.coordinator.tokens == {base64.b64decode(secret["data"]["token"]).decode()}


def test_the_operator_puts_nothing_but_status_on_the_users_objects(bench: Any) -> None:
    bench.apply()
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=30s", "loratask/t1")
    task = bench.kubectl.json("get", "loratask", "t1", "--show-managed-fields")
    meta = task["metadata"]
    assert "finalizers" not in meta
    assert set(meta["annotations"]) == {"kubectl.kubernetes.io/last-applied-configuration"}
    writers = {(one["manager"], one.get("subresource", "")) for one in meta["managedFields"]}
    assert writers == {("kubectl-client-side-apply", ""), ("mlora-operator", "status")}

    objects = [
        bench.kubectl.json("get", "lorapipeline", bench.pipeline()),
        bench.child("service"),
        bench.child("statefulset"),
        *bench.kubectl.json("get", "pods")["items"],
    ]
    for one in objects:
        assert "finalizers" not in one["metadata"], one["metadata"]
        assert not [name for name in one["metadata"].get("annotations", {}) if "kopf" in name]


def test_a_world_at_rest_is_not_written_to(bench: Any) -> None:
    bench.apply()
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=30s", "loratask/t1")
    bench.until(lambda: bench.child("statefulset")["spec"]["replicas"] == 0, "workers are gone when idle")
    bench.until(lambda: bench.status("lorapipeline", bench.pipeline())["state"] == "Idle", "it says so")

    def versions() -> list[str]:
        items = bench.kubectl.json("get", "loratask,lorapipeline,service,statefulset")["items"]
        return [one["metadata"]["resourceVersion"] for one in items]

    def at_rest() -> bool:
        before = versions()
        time.sleep(6)  # more than one pass without a wake
        return before == versions()

    bench.until(at_rest, "nothing changes any more", 60)


def test_events_tell_the_story(bench: Any) -> None:
    bench.apply()
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=30s", "loratask/t1")

    def told() -> list[str]:
        items = bench.kubectl.json("get", "events", "--field-selector", "involvedObject.name=t1")["items"]
        return [one["reason"] for one in items]

    bench.until(lambda: "AdapterUploaded" in told(), "the success is told")
    assert sorted(told()) == sorted(["CreatingPipeline", "Training", "AdapterUploaded"])


def test_a_restarted_operator_goes_on_and_trains_nothing_twice(bench: Any) -> None:
    bench.coordinator.hold = TaskPhase.TRAINING
    bench.apply("t1")
    bench.until(lambda: bench.status("loratask", "t1").get("state") == "Training", "t1 trains")
    assert bench.operator.stop() == 0
    bench.operator.start()
    generation = bench.coordinator.plans[-1].generation
    bench.coordinator.hold = None
    bench.apply("t2")
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=30s", "loratask/t1", "loratask/t2")
    assert bench.status("loratask", "t1").get("restarts") is None
    assert bench.coordinator.plans[-1].generation > generation
    assert bench.coordinator.run_id == "run-1"

    assert bench.operator.stop() == 0
    sent = len(bench.coordinator.plans)
    bench.operator.start()
    bench.apply("t3")
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=30s", "loratask/t3")
    assert {task.name for plan in bench.coordinator.plans[sent:] for task in plan.tasks} == {"t3"}


def test_a_group_that_starts_anew_gets_its_tasks_again(bench: Any) -> None:
    bench.coordinator.hold = TaskPhase.TRAINING
    bench.apply()
    bench.until(lambda: bench.status("loratask", "t1").get("state") == "Training", "it trains")
    bench.coordinator.restart()
    bench.until(lambda: bench.status("loratask", "t1").get("restarts") == 1, "the restart is counted")
    bench.coordinator.hold = None
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=30s", "loratask/t1")
    assert bench.status("loratask", "t1")["restarts"] == 1


def test_a_deleted_task_leaves_the_plan_and_the_others_go_on(bench: Any) -> None:
    bench.coordinator.hold = TaskPhase.TRAINING
    bench.apply("t1")
    bench.apply("t2")
    bench.until(lambda: len(bench.coordinator.known) == 2, "both are planned")
    bench.kubectl("delete", "loratask", "t1", "--timeout=10s")
    bench.until(lambda: len(bench.coordinator.known) == 1, "one is left")
    bench.coordinator.hold = None
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=30s", "loratask/t2")


def test_a_suspended_task_waits_and_a_changed_priority_is_passed_on(bench: Any) -> None:
    bench.coordinator.hold = TaskPhase.TRAINING
    bench.apply("t1", suspend=True)
    bench.apply("t2")
    bench.until(lambda: bench.status("loratask", "t1").get("state") == "Suspended", "t1 is suspended")
    bench.until(lambda: len(bench.coordinator.known) == 1, "t2 alone is planned")
    bench.kubectl("patch", "loratask", "t2", "--type=merge", "--patch", '{"spec": {"priority": 7}}')
    bench.until(lambda: bench.coordinator.plans[-1].tasks[0].priority == 7, "the plan has the new priority")
    bench.kubectl("patch", "loratask", "t1", "--type=merge", "--patch", '{"spec": {"suspend": false}}')
    bench.until(lambda: len(bench.coordinator.known) == 2, "both are planned")


def test_a_deleted_pipeline_takes_its_children_with_it(bench: Any) -> None:
    bench.coordinator.hold = TaskPhase.TRAINING
    bench.apply()
    bench.until(lambda: bench.status("loratask", "t1").get("state") == "Training", "it trains")
    bench.kubectl("delete", "loratask", "t1", "--timeout=10s")
    bench.kubectl("delete", "lorapipeline", bench.pipeline(), "--timeout=10s")
    selector = ("--selector", "app.kubernetes.io/managed-by=mlora-operator")
    bench.until(
        lambda: bench.kubectl.json("get", "service,statefulset,secret,pods", *selector)["items"] == [],
        "all children are gone",
        60,
    )
