"""``make demo``: three adapters trained together in a real cluster on this machine, from ``kubectl apply`` to PEFT.

The Makefile has started the cluster with its object store, built the images and converted the model. This installs the
chart, uploads model and rows, applies the quick start's tasks, watches them, fetches the adapters and compares them
with the base model through Hugging Face PEFT.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from rich.console import Console

from examples.compare import compare
from examples.demo_local import (
    EXAMPLES,
    HELDOUT_ROWS,
    MANIFEST,
    pipeline_facts,
    secret_manifest,
    trained_from,
)
from examples.model.smollm2 import smollm2
from examples.table import print_table, verdict, wide_console
from tests.cluster import s3 as seaweedfs
from tests.cluster.layout import CHECKOUT, this_state
from tests.fixtures.kubectl import Kubectl, kubectl_program
from tests.fixtures.storage import Storage, connect

OPERATOR_NAMESPACE = "mlora-system"
TASK_NAMESPACE = "mlora-demo"
MODEL_PREFIX = "smollm2-135m-instruct"
PATIENCE = "900"  # seconds for the three tasks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--end", action="store_true", help="uninstall everything again; the cluster stays up")
    end = parser.parse_args().end
    console, began = wide_console(), time.monotonic()
    state = this_state()
    kubectl = Kubectl(kubectl_program(), state.kubeconfig)
    access = seaweedfs.read_access(state.storage)
    environment = {**os.environ, "KUBECONFIG": str(state.kubeconfig)}

    console.print("[bold]1[/] object store: base model and rows uploaded")
    model = smollm2()
    upload(connect(access), model)

    console.print("[bold]2[/] helm: the operator installed from its chart")
    for namespace in (OPERATOR_NAMESPACE, TASK_NAMESPACE):
        kubectl.apply(namespace_manifest(namespace))
        kubectl.within(namespace).apply(secret_manifest(access))
    # The store's port behind its Service, which is where the workers' network policy has to let them go.
    port = urlsplit(access.endpoint).port or 80
    values = [
        *("--values", str(EXAMPLES / "demo-values.yaml")),
        *("--set", f"networkPolicy.workerPorts={{{port}}}"),
    ]
    subprocess.run(
        [str(state.tools / "helm"), "upgrade", "--install", "mlora", str(CHECKOUT / "charts/mlora-operator"),
         "--namespace", OPERATOR_NAMESPACE, *values, "--take-ownership", "--wait", "--timeout", "3m"],
        check=True, env=environment, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    # The image's tag stays the same when the code changes: make sure that the operator runs the present one.
    kubectl.within(OPERATOR_NAMESPACE)("rollout", "restart", "deployment")
    kubectl.within(OPERATOR_NAMESPACE)("rollout", "status", "deployment", "--timeout=120s")

    console.print("[bold]3[/] kubectl apply: three LoRATasks")
    tasks_kubectl = kubectl.within(TASK_NAMESPACE)
    tasks_kubectl("delete", "loratasks", "--all", "--wait=true")
    tasks_kubectl.apply(*replacing(MANIFEST))
    mlora = [str(Path(sys.executable).with_name("mlora"))]
    watched = subprocess.run(
        [*mlora, "watch", "--namespace", TASK_NAMESPACE, "--timeout", PATIENCE], check=False, env=environment
    )
    if watched.returncode:
        explain(console, kubectl)
        return 1
    until_trained = time.monotonic() - began
    console.print(tasks_kubectl("get", "loratasks", "--output", "wide"), markup=False)

    with tempfile.TemporaryDirectory(prefix="mlora-demo-") as folder:
        console.print("[bold]4[/] mlora fetch: adapters downloaded and verified")
        objects: list[dict[str, Any]] = tasks_kubectl.json("get", "loratasks")["items"]
        adapters = {task["metadata"]["name"]: Path(folder) / task["metadata"]["name"] for task in objects}
        for name, target in adapters.items():
            subprocess.run(
                [
                    *mlora,
                    "fetch",
                    name,
                    "-n",
                    TASK_NAMESPACE,
                    "-d",
                    str(target),
                    "--endpoint",
                    access.endpoint,
                ],
                check=True,
                env=environment,
            )
        console.print("[bold]5[/] PEFT: held-out loss with and without each adapter")
        comparison = compare(model, adapters, EXAMPLES / "gsm8k/heldout.jsonl", HELDOUT_ROWS)
    [pipeline] = kubectl.within(OPERATOR_NAMESPACE).json("get", "lorapipelines")["items"]
    facts = pipeline_facts(pipeline, time.monotonic() - began, until_trained)
    print_table(console, [trained_from(task) for task in objects], comparison, facts)
    if end:
        uninstall(kubectl, state.tools / "helm", environment)
    else:
        console.print(
            f'The cluster stays up: eval "$(make -s cluster-env)"; kubectl -n {TASK_NAMESPACE} get lt. '
            "`make cluster-down` ends it.",
            markup=False,
        )
    problems = verdict(comparison)
    for problem in problems:
        console.print(f"[red]{problem}[/]")
    return 1 if problems else 0


def uninstall(kubectl: Kubectl, helm: Path, environment: dict[str, str]) -> None:
    """Remove the tasks, the pipelines and the release."""
    kubectl.within(TASK_NAMESPACE)("delete", "loratasks", "--all")
    kubectl.within(OPERATOR_NAMESPACE)("delete", "lorapipelines", "--all")
    command = [
        str(helm),
        "uninstall",
        "mlora",
        "--namespace",
        OPERATOR_NAMESPACE,
        "--ignore-not-found",
        "--wait",
    ]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def replacing(manifest: Path) -> list[dict[str, Any]]:
    """The tasks of a file. The adapters of a former demonstration may lie there: these say that they may be replaced."""
    tasks: list[dict[str, Any]] = list(yaml.safe_load_all(manifest.read_text()))
    for task in tasks:
        task["spec"]["output"]["overwrite"] = True
    return tasks


def upload(store: Storage, model: Path) -> None:
    """Put model and rows into the store; a file that is there with the same size is left."""
    files = {path: ("models", f"{MODEL_PREFIX}/{path.name}") for path in sorted(model.iterdir())}
    files[EXAMPLES / "gsm8k/train.jsonl"] = ("datasets", "gsm8k/train.jsonl")
    for path, (bucket, key) in files.items():
        there = store.client.list_objects_v2(Bucket=bucket, Prefix=key).get("Contents", [])
        if not any(entry["Key"] == key and entry["Size"] == path.stat().st_size for entry in there):
            store.client.upload_file(str(path), bucket, key)


def namespace_manifest(name: str) -> dict[str, Any]:
    """A namespace that admits only pods of the restricted Pod Security Standard."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def explain(console: Console, kubectl: Kubectl) -> None:
    """What a person would look at when the tasks did not finish."""
    tasks, system = kubectl.within(TASK_NAMESPACE), kubectl.within(OPERATOR_NAMESPACE)
    for output in (
        tasks("describe", "loratasks"),
        system("get", "pods,lorapipelines", "--output", "wide"),
        system("logs", "deployment/mlora-mlora-operator", "--tail=40"),
        system("logs", "--selector=app.kubernetes.io/name=mlora-worker", "--tail=40", "--prefix"),
    ):
        console.print(output, markup=False)


if __name__ == "__main__":
    raise SystemExit(main())
