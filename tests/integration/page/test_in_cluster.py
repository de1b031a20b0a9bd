"""The page of an operator that the chart installed: from its image, through its Service, with two replicas."""

from __future__ import annotations

import http.client
import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.command import CommandFailed
from tests.fixtures.cluster import Cluster
from tests.fixtures.kubectl import Kubectl
from tests.fixtures.loratask import loratask
from tests.fixtures.release import installed, restricted

pytestmark = pytest.mark.integration

VALUES: dict[str, Any] = {"replicas": 2, "page": {"enabled": True}}
TASK: dict[str, Any] = {
    "baseModel": "nobody/serves-this",
    "dataset": {"inline": '{"prompt": "q", "completion": "a"}'},
    "output": {"uri": "s3://adapters/waits"},
}
Answer = tuple[int, str, bytes]


@pytest.fixture(scope="module")
def system(cluster: Cluster, kubectl: Kubectl) -> Iterator[Kubectl]:
    namespace = f"test-page-{secrets.token_hex(4)}"
    kubectl.create(restricted(namespace))
    values = {**VALUES, "watchNamespaces": [namespace]}
    try:
        with installed(cluster, kubectl, "page", namespace, values) as system:
            system.apply(loratask("waits", TASK))
            yield system
    finally:
        kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="module")
def ask(system: Kubectl) -> Callable[..., Answer]:
    """One request through the Service, on a connection of its own."""
    service = system.json("get", "service", "page-mlora-operator-page")["spec"]

    def answer(path: str, host: str | None = None) -> Answer:
        connection = http.client.HTTPConnection(host or service["clusterIP"], 8082, timeout=10)
        try:
            connection.request("GET", path)
            found = connection.getresponse()
            return found.status, found.headers["Content-Type"], found.read()
        finally:
            connection.close()

    return answer


def within(seconds: float, ask: Callable[[], Any], true: Callable[[Any], bool]) -> Any:
    deadline, found = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        try:
            found = ask()
        except OSError as error:
            found = error
        else:
            if true(found):
                return found
        time.sleep(0.5)
    pytest.fail(f"after {seconds:g} s: {found}")


def test_the_queue_is_there_for_who_asks_the_service_often_enough(ask: Callable[..., Answer]) -> None:
    status, kind, body = within(
        60, lambda: ask("/api/v1/tasks"), lambda found: found[0] == 200 and json.loads(found[2])["tasks"]
    )
    (task,) = json.loads(body)["tasks"]
    assert (status, kind) == (200, "application/json; charset=utf-8")
    assert (task["name"], task["reason"]) == ("waits", "NoPipelineForModel")


def test_the_files_are_in_the_image(ask: Callable[..., Answer]) -> None:
    for path, begins in (
        ("/", b"<!doctype html>"),
        ("/page.js", b"// "),
        ("/task.js", b"// "),
        ("/page.css", b":root"),
    ):
        status, _, body = ask(path)
        assert status == 200
        assert body.startswith(begins)


def test_the_replica_that_follows_says_who_leads(system: Kubectl, ask: Callable[..., Answer]) -> None:
    def replicas() -> tuple[str, dict[str, str]]:
        """Who holds the lease, and the addresses of those that are there to stay."""
        pods = system.json("get", "pods", "-l", "app.kubernetes.io/component=operator")["items"]
        lease = system.json("get", "lease", "page-mlora-operator")
        staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        addresses = {pod["metadata"]["name"]: pod["status"].get("podIP", "") for pod in staying}
        return lease["spec"]["holderIdentity"], addresses

    holder, addresses = within(60, replicas, lambda found: len(found[1]) == 2 and found[0] in found[1])
    leader = addresses.pop(holder)
    assert within(30, lambda: ask("/api/v1/overview", leader), lambda one: one[0] == 200)
    (follower,) = addresses.values()
    status, _, body = (
        within(  # it looks at the lease every few seconds, and may know a former leader until then
            30, lambda: ask("/api/v1/overview", follower), lambda found: holder.encode() in found[2]
        )
    )
    assert (status, json.loads(body)["error"], json.loads(body)["leader"]) == (503, "following", holder)


def test_the_api_server_s_proxy_leads_to_it(system: Kubectl, ask: Callable[..., Answer]) -> None:
    within(60, lambda: ask("/api/v1/overview"), lambda found: found[0] == 200)
    service = f"/api/v1/namespaces/{system.namespace}/services/page-mlora-operator-page:http/proxy"
    for _ in range(20):  # a replica that follows answers with an error, too
        try:
            answer = system("get", "--raw", f"{service}/api/v1/overview")
        except CommandFailed:
            time.sleep(0.5)
        else:
            assert json.loads(answer)["states"] == {"Rejected": 1}
            return
    pytest.fail("no answer through the API server's proxy")
