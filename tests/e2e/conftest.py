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

import pytest
import yaml

from tests.cluster.gobinaries import helm
from tests.fixtures.cluster import Cluster
from tests.fixtures.kubectl import Kubectl
from tests.fixtures.loratask import loratask
from tests.fixtures.storage import Storage

ROOT = Path(__file__).parents[2]
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


def secret(name: str, access_key: str, secret_key: str) -> dict[str, Any]:
    data = {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}


def restricted(name: str) -> dict[str, Any]:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


@pytest.fixture(scope="session")
def path(
    cluster: Cluster,
    kubectl: Kubectl,
    s3: Storage,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[WholePath]:
    """An installed release that looks at one namespace; uninstalled at the end of the run."""
    for file in tiny_model.iterdir():
        s3.client.upload_file(str(file), "models", f"tiny-e2e/{file.name}")
    kubectl.apply(restricted(OPERATOR_NAMESPACE), restricted(TASK_NAMESPACE))
    system, tasks = kubectl.within(OPERATOR_NAMESPACE), kubectl.within(TASK_NAMESPACE)
    for one in (system, tasks):
        one.apply(secret("s3-credentials", s3.access_key, s3.secret_key))
    values = tmp_path_factory.mktemp("helm") / "values.yaml"
    values.write_text(yaml.safe_dump(chart_values(cluster, s3)))
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    run = [str(helm()), "--namespace", OPERATOR_NAMESPACE]
    chart = str(ROOT / "charts/mlora-operator")
    subprocess.run(
        # The CRDs may be there from other tests.
        [
            *run,
            "upgrade",
            "--install",
            RELEASE,
            chart,
            "--values",
            str(values),
            "--take-ownership",
            "--wait",
            "--timeout",
            "3m",
        ],
        check=True,
        env=environment,
    )
    system("rollout", "restart", "deployment")  # the image's tag stays when the code changes
    system("rollout", "status", "deployment", "--timeout=120s")
    try:
        yield WholePath(tasks, system, s3, environment)
    finally:
        tasks("delete", "loratasks", "--all", "--wait=false")
        system("delete", "lorapipelines", "--all", "--wait=false")
        subprocess.run([*run, "uninstall", RELEASE, "--wait"], check=False, env=environment)
        kubectl("delete", "namespace", OPERATOR_NAMESPACE, TASK_NAMESPACE, "--wait=true", "--timeout=120s")


def chart_values(cluster: Cluster, s3: Storage) -> dict[str, Any]:
    def image(name: str) -> dict[str, str]:
        repository, tag = name.rsplit(":", 1)
        return {
            "repository": repository,
            "tag": tag,
            "pullPolicy": "Never" if cluster.own else "IfNotPresent",
        }

    return {
        "image": image(cluster.operator_image),
        "worker": {"image": image(cluster.worker_image)},
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
    }
