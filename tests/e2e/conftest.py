"""The operator installed from its chart and its image, with a base model that trains in seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.fixtures.cluster import Cluster
from tests.fixtures.kubectl import Kubectl
from tests.fixtures.loratask import loratask
from tests.fixtures.release import installed, restricted, secret
from tests.fixtures.storage import Storage

RELEASE, OPERATOR_NAMESPACE, TASK_NAMESPACE = "e2e", "mlora-e2e", "mlora-e2e-tasks"
MODEL = "Org/Tiny-Llama"
IDLE_TIMEOUT = 25  # seconds


@dataclass
class WholePath:
    """The whole path: kubectl for the tasks' namespace and for the operator's, the store, and the installed release."""

    tasks: Kubectl
    system: Kubectl
    store: Storage
    environment: dict[str, str]
    counter: int = field(default=0)

    def apply(self, name: str, **spec: Any) -> str:
        """Apply a good task with ``spec`` merged over it; its name."""
        self.tasks.apply(task_manifest(name, self.store, spec))
        return name

    def task(self, name: str) -> dict[str, Any]:
        return self.tasks.json("get", "loratask", name)

    def conditions(self, name: str) -> dict[str, dict[str, Any]]:
        held = self.task(name).get("status", {}).get("conditions", [])
        return {condition["type"]: condition for condition in held}

    def wait(self, name: str, condition: str, seconds: int = 240) -> dict[str, Any]:
        """Until ``condition`` is True, as a pipeline's script would do it; the task."""
        self.tasks("wait", f"--for=condition={condition}", f"loratask/{name}", f"--timeout={seconds}s")
        return self.task(name)

    def until(self, what: str, done: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.explain()}"
            time.sleep(0.5)

    def mlora(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The installed command, as a person runs it."""
        program = Path(sys.executable).with_name("mlora")
        return subprocess.run(
            [str(program), *arguments], capture_output=True, text=True, check=False, env=self.environment
        )

    def objects(self, name: str) -> list[str]:
        """What lies below a task's output."""
        return self.store.keys("adapters", f"{TASK_NAMESPACE}/{name}/")

    def weights(self, name: str) -> bytes:
        """A task's adapter as it lies in the store."""
        key = f"{TASK_NAMESPACE}/{name}/adapter_model.safetensors"
        body: bytes = self.store.client.get_object(Bucket="adapters", Key=key)["Body"].read()
        return body

    def pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.system.json(
            "get", "pods", "-l", "app.kubernetes.io/name=mlora-worker"
        )["items"]
        return found

    def explain(self) -> str:
        return "\n".join(
            (
                self.tasks("get", "loratasks", "-o", "wide"),
                self.system("get", "pods,lorapipelines", "-o", "wide"),
                self.system("logs", "-l", "app.kubernetes.io/name=mlora-operator", "--tail=30"),
                self.system("logs", "-l", "app.kubernetes.io/name=mlora-worker", "--tail=30", "--prefix"),
            )
        )


def task_manifest(name: str, store: Storage, spec: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {"prompt": f"What is {name} {i}? " + "Think. " * (i % 4), "completion": f"It is {i}."}
        for i in range(16)
    ]
    good: dict[str, Any] = {
        "baseModel": MODEL,
        "lora": {"rank": 4, "alpha": 8, "targetModules": ["q_proj", "v_proj"]},
        "dataset": {"inline": "\n".join(json.dumps(row) for row in rows)},
        "training": {"batchSize": 4, "maxSteps": 5, "learningRate": 0.001, "maxSeqLength": 128},
        "output": {"uri": f"s3://adapters/{TASK_NAMESPACE}/{name}"},
        "storage": {"endpoint": store.inside, "secretRef": {"name": "s3-credentials"}},
    }
    return loratask(name, good | spec)


@pytest.fixture(scope="session")
def path(
    cluster: Cluster,
    kubectl: Kubectl,
    s3: Storage,
    tiny_model: Path,
) -> Iterator[WholePath]:
    """An installed release that looks at one namespace; uninstalled at the end of the run."""
    for file in tiny_model.iterdir():
        s3.client.upload_file(str(file), "models", f"tiny-e2e/{file.name}")
    # What a run that failed has left: its checkpoints are of other tasks.
    for key in s3.keys("adapters", f"{TASK_NAMESPACE}/"):
        s3.client.delete_object(Bucket="adapters", Key=key)
    kubectl.apply(restricted(OPERATOR_NAMESPACE), restricted(TASK_NAMESPACE))
    system, tasks = kubectl.within(OPERATOR_NAMESPACE), kubectl.within(TASK_NAMESPACE)
    for one in (system, tasks):
        one.apply(secret("s3-credentials", s3.access_key, s3.secret_key))
    with installed(cluster, kubectl, RELEASE, OPERATOR_NAMESPACE, chart_values(s3)):
        try:
            yield WholePath(tasks, system, s3, {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)})
        finally:
            tasks("delete", "loratasks", "--all", "--wait=false")
            system("delete", "lorapipelines", "--all", "--wait=false")
    kubectl("delete", "namespace", OPERATOR_NAMESPACE, TASK_NAMESPACE, "--wait=true", "--timeout=120s")


def chart_values(s3: Storage) -> dict[str, Any]:
    return {
        "watchNamespaces": [TASK_NAMESPACE],
        "models": [{"name": MODEL, "uri": "s3://models/tiny-e2e", "dtype": "float32", "stages": 2}],
        "pipelineDefaults": {
            "idleTimeout": f"{IDLE_TIMEOUT}s",
            "storage": {"endpoint": s3.inside, "secretRef": {"name": "s3-credentials"}},
            "worker": {
                "threads": 1,
                "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}},
            },
        },
        "log": {"format": "text"},
        # Where packets to the store arrive, behind its Service.
        "networkPolicy": {"workerPorts": [urlsplit(s3.endpoint).port or 80]},
    }
