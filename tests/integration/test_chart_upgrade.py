"""A release on a real node: from the former chart to this one, tested from inside, then rolled over with two replicas."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import gobinaries
from tests.cluster.command import run
from tests.fixtures.cluster import Cluster
from tests.fixtures.kubectl import Kubectl
from tests.fixtures.loratask import loratask

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "mlora-operator"
FORMER = ROOT / "tests" / "fixtures" / "charts" / "mlora-operator-0.1.0.tgz"
MODEL = "Org/Toy-1B"


class Release:
    """``helm`` for one release in one namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        # With a letter first: the former chart's labels read a name such as 804425e2 as a number.
        self.name = f"m-{namespace.removeprefix('test-')}"
        self.full = self.name
        self._arguments = (gobinaries.helm(), "--kubeconfig", cluster.kubeconfig, "--namespace", namespace)

        def image(name: str) -> dict[str, str]:
            repository, tag = name.rsplit(":", 1)
            policy = "Never" if cluster.own else "IfNotPresent"
            return {"repository": repository, "tag": tag, "pullPolicy": policy}

        self.values: dict[str, Any] = {
            "fullnameOverride": self.full,
            "image": image(cluster.operator_image),
            "worker": {"image": image(cluster.worker_image)},
            "watchNamespaces": [namespace],
            "crds": {"install": False},  # other tests use them at the same time
            "models": [
                {"name": MODEL, "uri": "s3://models/toy", "worker": {"nodeSelector": {"nowhere": "yes"}}}
            ],
            "log": {"format": "text"},
        }

    def upgrade(self, chart: Path, **more: Any) -> None:
        arguments = ("upgrade", "--install", self.name, chart, "--values", "-", "--wait", "--timeout", "3m")
        run(*self._arguments, *arguments, stdin=json.dumps({**self.values, **more}))

    def __call__(self, *arguments: str) -> str:
        return run(*self._arguments, *arguments)


def until(holds: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := holds():
            return found
        time.sleep(0.3)
    raise AssertionError(f"after {seconds:g} s not: {what}")


def task(name: str, **spec: Any) -> dict[str, Any]:
    return loratask(
        name,
        {
            "baseModel": MODEL,
            "dataset": {"inline": '{"prompt": "a", "completion": "b"}\n'},
            "output": {"uri": f"s3://adapters/{name}"},
            **spec,
        },
    )


def test_a_release_is_upgraded_tested_rolled_over_and_uninstalled(
    cluster: Cluster, kubectl: Kubectl, namespace: str
) -> None:
    kubectl("apply", "--filename", str(ROOT / "crds"))
    inside, release = kubectl.within(namespace), Release(cluster, namespace)

    def strategy() -> str:
        return str(inside.json("get", "deployment", release.full)["spec"]["strategy"]["type"])

    def holder() -> str:
        leases = inside.json("get", "leases")["items"]
        return str(leases[0]["spec"]["holderIdentity"]) if leases else ""

    def operators() -> set[str]:
        pods = inside.json("get", "pods", "--selector", "app.kubernetes.io/component=operator")["items"]
        return {one["metadata"]["name"] for one in pods if "deletionTimestamp" not in one["metadata"]}

    release.upgrade(FORMER)
    inside.apply(task("asleep", suspend=True), task("awake"))
    asleep = inside.json("get", "loratask", "asleep")["metadata"]["uid"]
    assert strategy() == "Recreate"

    try:
        # The former operator knows no Lease, so it is gone before the new one acts.
        release.upgrade(CHART)
        assert strategy() == "Recreate"
        (only,) = operators()
        until(lambda: holder() == only, "the new operator leads")
        until(
            lambda: inside.json("get", "loratask", "asleep").get("status", {}).get("state") == "Suspended",
            "tasks of before are seen to",
        )
        assert inside.json("get", "loratask", "asleep")["metadata"]["uid"] == asleep
        said = release("test", release.name, "--logs", "--timeout", "2m")
        assert said.count("ok      ") == 4, said
        assert "FAILED" not in said

        # Now one by one: there is always a pod that is ready.
        release.upgrade(
            CHART,
            replicas=2,
            podDisruptionBudget={"enabled": True},
            log={"format": "text", "level": "debug"},  # new settings start new pods
        )
        assert strategy() == "RollingUpdate"
        until(lambda: len(operators()) == 2 and only not in operators(), "the former pod is gone")
        assert until(holder, "there is a leader") in operators()
        assert inside.json("get", "poddisruptionbudget", release.full)["spec"]["maxUnavailable"] == 1
        workers = ("--selector", "app.kubernetes.io/name=mlora-worker")
        policies = until(
            lambda: inside.json("get", "networkpolicies", *workers)["items"], "the pipeline has its policy"
        )
        groups = inside.json("get", "statefulsets", *workers)["items"]
        assert [one["metadata"]["name"] for one in policies] == [one["metadata"]["name"] for one in groups]

        release("uninstall", release.name, "--wait")
        assert operators() == set()
        assert inside.json("get", "loratask", "asleep")["metadata"]["uid"] == asleep
    finally:
        release("uninstall", release.name, "--ignore-not-found")


def test_objects_of_the_former_crds_live_on_under_the_present_ones(kubectl: Kubectl, namespace: str) -> None:
    """Under another group, since the real one is in use."""
    group = f"{namespace}.mlora.dev"

    def definitions(chart: Path) -> list[dict[str, Any]]:
        arguments = ("template", "rel", chart, "--kube-version=1.34.4", "--show-only", "templates/crds.yaml")
        text = run(gobinaries.helm(), *arguments).replace("mlora.dev", group)
        return [one for one in yaml.safe_load_all(text) if one]

    plurals = [f"loratasks.{group}", f"lorapipelines.{group}"]
    names = [f"crd/{name}" for name in plurals]
    established = ("wait", "--for=condition=Established", "--timeout=30s", *names)
    inside = kubectl.within(namespace)
    try:
        kubectl.apply(*definitions(FORMER))
        kubectl(*established)
        made = {**task("old", priority=7), "apiVersion": f"{group}/v1alpha1"}
        until(lambda: _done(lambda: inside.apply(made)), "the former kind takes a task", 20)
        status = json.dumps({"status": {"state": "Training", "step": 3, "restarts": 1}})
        inside("patch", plurals[0], "old", "--subresource=status", "--type=merge", "--patch", status)
        before = inside.json("get", plurals[0], "old")

        kubectl.apply(*definitions(CHART))
        kubectl(*established)
        after = inside.json("get", plurals[0], "old")
        assert after["metadata"]["uid"] == before["metadata"]["uid"]
        assert after["status"] == before["status"]
        assert holds(after["spec"], before["spec"]), (after["spec"], before["spec"])
        inside("patch", plurals[0], "old", "--type=merge", "--patch", json.dumps({"spec": {"priority": 8}}))
    finally:
        kubectl("delete", *names, "--wait=false", "--ignore-not-found")


def holds(now: Any, before: Any) -> bool:
    """Whether nothing was lost or changed; new fields with defaults may have come."""
    if isinstance(now, dict) and isinstance(before, dict):
        return all(name in now and holds(now[name], value) for name, value in before.items())
    return bool(now == before)


def _done(action: Callable[[], Any]) -> bool:
    try:
        action()
    except RuntimeError:
        return False
    return True
