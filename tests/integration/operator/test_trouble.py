"""What is wrong is said where the user looks, and a fix is enough."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from kubernetes.aio import client, config

from mlora_operator.manifests.secret import CertificatePair
from mlora_operator.reconcile.cluster.api_server import ApiServerCluster, Indexes
from mlora_operator.reconcile.cluster.rest_client import KubeApi
from mlora_operator.reconcile.state.decode import read_task
from mlora_operator.reconcile.state.snapshot import Task
from mlora_operator.settings import Settings
from mlora_worker.protocol import TaskPhase

pytestmark = pytest.mark.integration


def test_a_file_in_a_cluster_is_refused_with_its_field(bench: Any) -> None:
    bench.apply(dataset={"uri": "file:///rows.jsonl"})
    bench.until(lambda: bench.condition("t1", "Accepted")[1] == "InvalidSpec", "it is refused")
    assert "spec.dataset.uri" in bench.condition("t1", "Accepted")[2]


def test_a_model_that_nobody_serves_names_those_that_are_served(bench: Any) -> None:
    bench.apply(baseModel="Org/Typo")
    bench.until(lambda: bench.condition("t1", "Accepted")[1] == "NoPipelineForModel", "it is refused")
    assert "Org/Toy-1B" in bench.condition("t1", "Accepted")[2]


def test_a_late_secret_is_picked_up_and_its_keys_are_stripped(bench: Any) -> None:
    bench.apply(storage={"endpoint": "http://s3:8333", "secretRef": {"name": "keys"}})
    bench.until(lambda: bench.condition("t1", "Accepted")[1] == "SecretNotFound", "the Secret is missed")
    bench.kubectl.create(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "keys"},
            "stringData": {"AWS_ACCESS_KEY_ID": "id\n", "AWS_SECRET_ACCESS_KEY": " secret\n"},
        }
    )
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=60s", "loratask/t1")
    access = bench.coordinator.plans[-1].tasks or bench.coordinator.plans[-2].tasks
    storage = access[0].storage
    assert storage.access_key.get_secret_value() == "id"
    assert storage.secret_key.get_secret_value() == "secret"
    assert "secret" not in json.dumps(bench.kubectl.json("get", "loratask", "t1")["status"]).replace(
        "secretRef", ""
    )
    assert " secret" not in bench.operator.log.read_text()


def test_a_pod_without_a_node_is_explained_and_a_corrected_pipeline_replaces_it(bench: Any) -> None:
    bench.coordinator.hold = TaskPhase.PREPARING
    bench.apply()
    name = bench.pipeline()
    bench.until(
        lambda: bench.condition(name, "WorkersAvailable", "lorapipeline")[1] == "PodNotStarting",
        "the pipeline says why",
    )
    assert "node affinity/selector" in bench.condition(name, "WorkersAvailable", "lorapipeline")[2]
    before = {one["metadata"]["uid"] for one in bench.kubectl.json("get", "pods")["items"]}
    assert len(before) == 2

    fix = {"spec": {"worker": {"nodeSelector": {"nowhere": None, "elsewhere": "yes"}}}}
    bench.kubectl("patch", "lorapipeline", name, "--type=merge", "--patch", json.dumps(fix))

    def replaced() -> bool:
        pods = bench.kubectl.json("get", "pods")["items"]
        return len(pods) == 2 and all(
            one["metadata"]["uid"] not in before and one["spec"]["nodeSelector"] == {"elsewhere": "yes"}
            for one in pods
        )

    bench.until(replaced, "all pods have the corrected configuration", 60)


def test_a_quota_that_keeps_pods_away_is_quoted(bench: Any) -> None:
    bench.kubectl.create(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "none"},
            "spec": {"hard": {"pods": "0"}},
        }
    )
    bench.until(
        lambda: bench.kubectl.json("get", "resourcequota", "none").get("status", {}).get("hard"),
        "quota is in force",
    )
    bench.coordinator.hold = TaskPhase.PREPARING
    bench.apply()
    name = bench.pipeline()
    bench.until(
        lambda: "exceeded quota" in bench.condition(name, "WorkersAvailable", "lorapipeline")[2],
        "the quota's words are on the pipeline",
        60,
    )


def test_a_statefulset_that_someone_changed_or_deleted_comes_back(bench: Any) -> None:
    bench.coordinator.hold = TaskPhase.TRAINING
    bench.apply()
    bench.until(lambda: bench.status("loratask", "t1").get("state") == "Training", "it trains")
    name = bench.child("statefulset")["metadata"]["name"]
    bench.kubectl("scale", "statefulset", name, "--replicas=1")
    bench.until(lambda: bench.child("statefulset")["spec"]["replicas"] == 2, "it has two replicas again")
    bench.kubectl("delete", "service", name)
    bench.until(lambda: bench.child("service"), "the service is back")
    bench.kubectl("delete", "statefulset", name)
    bench.until(lambda: bench.child("statefulset")["spec"]["replicas"] == 2, "the StatefulSet is back")


def test_a_lost_token_is_made_anew(bench: Any) -> None:
    bench.coordinator.hold = TaskPhase.TRAINING
    bench.apply()
    bench.until(lambda: bench.status("loratask", "t1").get("state") == "Training", "it trains")
    secret = f"{bench.child('statefulset')['metadata']['name']}-token"
    bench.kubectl("delete", "secret", secret)
    bench.until(
        lambda: bench.kubectl("get", "secret", secret, "--ignore-not-found", "--output", "name"),
        "the Secret is back",
        40,
    )
    bench.coordinator.hold = None
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=30s", "loratask/t1")


def test_objects_deleted_behind_the_watchs_back_are_found_out(bench: Any) -> None:
    """The indexes here are the test's own."""
    bench.apply(suspend=True)
    real = bench.kubectl.json("get", "loratask", "t1")
    ghost = {**real, "metadata": {**real["metadata"], "name": "ghost", "uid": "not-there"}}

    async def audit() -> tuple[list[bool], list[str]]:
        async with api_server(bench, lambda: [real, ghost]) as server:
            found = [await server.audit(), await server.audit()]
            return found, [raw["metadata"]["name"] for raw in server.objects().tasks]

    assert asyncio.run(audit()) == ([True, False], ["t1"])


def test_a_write_that_comes_late_takes_nothing_back_and_one_about_another_object_is_gone(bench: Any) -> None:
    bench.apply(suspend=True)
    bench.until(lambda: bench.status("loratask", "t1").get("state") == "Suspended", "it is seen to")
    seen = read_task(bench.kubectl.json("get", "loratask", "t1"), allow_file_uris=False)

    async def write(about: Task, step: int) -> str:
        async with api_server(bench, list) as server:
            try:
                await server.patch_task_status(about, {"step": step})
            except Exception as error:
                return type(error).__name__
            return "done"

    assert asyncio.run(write(seen, 1)) == "done"
    assert asyncio.run(write(seen, 2)) == "ApiError"  # to be tried again, upon what is there now
    assert asyncio.run(write(replace(seen, uid="another"), 3)) == "Gone"
    assert bench.status("loratask", "t1")["step"] == 1


def unencrypted(host: str) -> CertificatePair:
    raise AssertionError(f"nobody asked for a certificate of {host}")


@contextlib.asynccontextmanager
async def api_server(bench: Any, tasks: Callable[[], list[Any]]) -> AsyncIterator[ApiServerCluster]:
    """The operator's own edge to the API server, with indexes of our own."""
    settings = Settings.model_validate(
        {"namespace": bench.namespace, "watchNamespaces": [bench.namespace], "worker": {"image": "w"}}
    )
    configuration = client.Configuration()
    await config.load_kube_config(str(bench.kubectl.kubeconfig), client_configuration=configuration)
    async with client.ApiClient(configuration) as api:
        nothing: Callable[[], list[Any]] = list
        indexes = Indexes(tasks, nothing, nothing, nothing, nothing, nothing)
        yield ApiServerCluster(KubeApi(api), indexes, settings, lambda: "token", unencrypted)
