"""How tasks end and go: deadlines, another try, time to live, and deletion in any order, with whatever names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlora_worker.protocol import TaskPhase
from tests.integration.operator.conftest import task_manifest

pytestmark = pytest.mark.integration

LONG = "0." + "a-very-long-name-" * 14 + "x1.2-end"


def test_names_of_253_characters_digits_and_dots(bench: Any) -> None:
    """A pipeline's and a task's; the children's names are labels."""
    pipeline, name = LONG.ljust(253, "9"), ("7." + LONG).ljust(253, "8")
    spec = {"model": {"name": "Org/Long", "uri": "s3://models/long"}, "stages": 2}
    worker = {"worker": {"nodeSelector": {"nowhere": "yes"}}}
    bench.kubectl.apply(
        {
            "apiVersion": "mlora.dev/v1alpha1",
            "kind": "LoRAPipeline",
            "metadata": {"name": pipeline},
            "spec": spec | worker,
        },
        task_manifest(name, baseModel="Org/Long", output={"uri": "s3://adapters/long"}),
    )
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=60s", f"loratask/{name}")
    for kind in ("service", "statefulset"):
        child = bench.child(kind)["metadata"]
        assert len(child["name"]) <= 52
        assert child["ownerReferences"][0]["name"] == pipeline
    told = bench.kubectl.json("get", "events")["items"]
    assert name in {one["involvedObject"]["name"] for one in told if one["reason"] == "AdapterUploaded"}


def test_a_deadline_another_try_and_the_time_to_live(bench: Any) -> None:
    """One that nobody serves fails, is tried again once somebody does, and goes when its time is over."""
    bench.apply(baseModel="Org/Late", startDeadlineSeconds=5)
    bench.kubectl("wait", "--for=condition=Failed", "--timeout=30s", "loratask/t1")
    status, reason, message = bench.condition("t1", "Failed")
    assert (status, reason) == ("True", "DeadlineExceeded")
    assert "NoPipelineForModel" in message
    serve = {"model": {"name": "Org/Late", "uri": "s3://models/late"}, "stages": 2}
    bench.kubectl.apply(
        {
            "apiVersion": "mlora.dev/v1alpha1",
            "kind": "LoRAPipeline",
            "metadata": {"name": "late"},
            "spec": serve | {"worker": {"nodeSelector": {"nowhere": "yes"}}},
        }
    )
    patch = {"spec": {"startDeadlineSeconds": 600, "ttlSecondsAfterFinished": 8}}
    bench.kubectl("patch", "loratask", "t1", "--type=merge", "--patch", json.dumps(patch))
    assert bench.status("loratask", "t1")["state"] == "Failed"
    bench.kubectl("annotate", "loratask", "t1", "mlora.dev/retry=1")
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=30s", "loratask/t1")
    assert bench.status("loratask", "t1")["retries"] == 1
    bench.kubectl("annotate", "loratask", "t1", "mlora.dev/retry=2", "--overwrite")  # means nothing now
    bench.kubectl("wait", "--for=delete", "--timeout=40s", "loratask/t1")
    assert bench.coordinator.uploads == ["t1"]
    assert {"DeadlineExceeded", "Retried", "AdapterUploaded"} <= {
        one["reason"] for one in bench.kubectl.json("get", "events")["items"]
    }


def test_one_output_has_one_task(bench: Any) -> None:
    bench.coordinator.hold = TaskPhase.TRAINING
    bench.apply("t1", output={"uri": "s3://adapters/one"})
    bench.until(lambda: bench.status("loratask", "t1").get("state") == "Training", "the first trains")
    bench.apply("t2", output={"uri": "s3://adapters/one/two/"})
    bench.until(lambda: bench.condition("t2", "Accepted")[1] == "OutputInUse", "the second has no place")
    assert "task t1 writes to a folder above it" in bench.condition("t2", "Accepted")[2]
    bench.kubectl("delete", "loratask", "t1")
    bench.coordinator.hold = None
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=30s", "loratask/t2")


def test_a_running_task_that_is_deleted_leaves_its_neighbour_alone(bench: Any) -> None:
    bench.coordinator.hold = TaskPhase.TRAINING
    for name in ("t1", "t2"):
        bench.apply(name)
    for name in ("t1", "t2"):
        bench.until(lambda name=name: bench.status("loratask", name).get("state") == "Training", "it trains")
    bench.kubectl("delete", "loratask", "t1", "--timeout=10s")
    bench.until(lambda: len(bench.coordinator.known) == 1, "its coordinator has forgotten it")
    bench.coordinator.hold = None
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=30s", "loratask/t2")
    assert bench.coordinator.uploads == ["t2"]


def test_a_pipeline_that_is_deleted_first_takes_its_children_along(bench: Any) -> None:
    bench.coordinator.hold = TaskPhase.TRAINING
    bench.apply()
    bench.until(lambda: bench.status("loratask", "t1").get("state") == "Training", "it trains")
    child = bench.child("statefulset")["metadata"]["name"]
    old = bench.kubectl.json("get", "statefulset", child)["metadata"]["uid"]
    former = bench.kubectl.json("get", "lorapipeline", bench.pipeline())["metadata"]["uid"]
    bench.kubectl("delete", "lorapipeline", bench.pipeline(), "--timeout=10s")

    def gone() -> bool:
        """Or the pipeline that the catalogue made anew was quicker than the garbage collector, and took it over."""
        found = bench.kubectl.json("get", "statefulset")["items"]
        owners = [own["uid"] for one in found for own in one["metadata"].get("ownerReferences", ())]
        return former not in owners and (bool(owners) or old not in {one["metadata"]["uid"] for one in found})

    bench.until(gone, "its StatefulSet is gone, or another's")
    bench.coordinator.restart()
    bench.coordinator.hold = None
    # The catalogue makes its pipeline anew for a task that still waits.
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=40s", "loratask/t1")
    bench.kubectl("delete", "loratask", "t1", "--timeout=10s")


def test_everything_can_be_deleted_while_no_operator_is_there(bench: Any) -> None:
    """The namespace with it, and in that order nothing waits for a finalizer. The last test of this file."""
    bench.coordinator.hold = TaskPhase.TRAINING
    for name in ("t1", "t2"):
        bench.apply(name)
    bench.until(lambda: bench.status("loratask", "t2").get("state") == "Training", "it trains")
    pipeline = bench.pipeline()
    assert bench.operator.stop() == 0
    bench.kubectl("delete", "loratask", "t1", "--timeout=10s")
    bench.kubectl("delete", "lorapipeline", pipeline, "--timeout=10s")
    ours = ("--selector", "app.kubernetes.io/managed-by=mlora-operator")
    bench.until(
        lambda: bench.kubectl.json("get", "service,statefulset,secret,pods", *ours)["items"] == [],
        "the children went by themselves",
        40,
    )
    bench.kubectl("delete", "namespace", bench.namespace, "--timeout=60s")  # with a task in it that had begun
