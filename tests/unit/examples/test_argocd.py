"""The health checks for Argo CD, run by a Lua of the version that Argo CD embeds (5.1), with the base library alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa import lua51

from mlora_operator.manifests.names import RETRY

FOLDER = Path(__file__).parents[3] / "examples" / "argocd"
# Libraries that a health check does not get.
CLOSED = ("os", "io", "package", "require", "debug", "dofile", "loadfile", "python")


def health(script: str, obj: dict[str, Any]) -> tuple[str, str]:
    """Status and message that the script gives ``obj``."""
    lua = lua51.LuaRuntime(register_eval=False, register_builtins=False)
    for name in CLOSED:
        lua.globals()[name] = None
    lua.globals()["obj"] = lua.table_from(obj, recursive=True)
    found = lua.execute((FOLDER / script).read_text())
    assert set(found) == {"status", "message"}
    return found["status"], found["message"]


def condition(type_: str, status: str = "True", reason: str = "R", message: str = "words") -> dict[str, str]:
    return {"type": type_, "status": status, "reason": reason, "message": message}


def task(
    *conditions: dict[str, str],
    generation: int = 1,
    suspend: bool = False,
    annotations: dict[str, str] | None = None,
    **status: Any,
) -> dict[str, Any]:
    return {
        "metadata": {"name": "a", "generation": generation, "annotations": annotations or {}},
        "spec": {"suspend": suspend},
        "status": {"conditions": list(conditions), **status},
    }


RUNS = {"state": "Training", "progress": "12/50", "loss": "1.5", "observedGeneration": 1}
ADAPTER = {"uri": "s3://x/a", "bytes": 1}
TASKS: dict[str, tuple[dict[str, Any], str, str]] = {
    "new": ({"metadata": {"name": "a"}, "spec": {}}, "Progressing", "no operator has processed it yet"),
    "trains": (task(condition("Running"), **RUNS), "Progressing", "Training 12/50, loss 1.5"),
    "waits": (task(state="Queued"), "Progressing", "Queued"),
    "preempted": (task(condition("Preempted"), state="Preempted"), "Progressing", "Preempted"),
    "done": (task(condition("Succeeded"), state="Succeeded", adapter=ADAPTER), "Healthy", "s3://x/a"),
    "done, then its priority was changed": (
        task(condition("Succeeded"), state="Succeeded", adapter=ADAPTER, generation=2, observedGeneration=1),
        "Healthy",
        "s3://x/a",
    ),
    "done, though suspended": (
        task(condition("Succeeded"), suspend=True, state="Succeeded", adapter=ADAPTER),
        "Healthy",
        "s3://x/a",
    ),
    "failed": (
        task(condition("Failed", reason="InvalidRow"), state="Failed"),
        "Degraded",
        "InvalidRow: words",
    ),
    "failed, and its user asks for another try": (
        task(condition("Failed", reason="InvalidRow"), state="Failed", retry="1", annotations={RETRY: "2"}),
        "Progressing",
        "failed, and is about to be tried again",
    ),
    "failed, after another try": (
        task(condition("Failed", reason="InvalidRow"), state="Failed", retry="2", annotations={RETRY: "2"}),
        "Degraded",
        "InvalidRow: words",
    ),
    "not failed": (task(condition("Failed", "False"), **RUNS), "Progressing", "Training 12/50, loss 1.5"),
    "suspended": (task(suspend=True, state="Suspended"), "Suspended", "spec.suspend is true"),
    "a change that was not seen": (
        task(generation=2, state="Rejected", observedGeneration=1),
        "Progressing",
        "the operator has not yet seen the last change",
    ),
    "rejected": (
        task(
            condition("Accepted", "False", "NamespaceNotAllowed"),
            state="Rejected",
            reason="NamespaceNotAllowed",
        ),
        "Degraded",
        "NamespaceNotAllowed: words",
    ),
    "too large": (
        task(
            condition("Accepted"),
            condition("Admitted", "False", "ExceedsCapacity"),
            state="Rejected",
            reason="ExceedsCapacity",
        ),
        "Degraded",
        "ExceedsCapacity: words",
    ),
    "its Secret may come with the same sync": (
        task(condition("Accepted", "False", "SecretNotFound"), state="Rejected", reason="SecretNotFound"),
        "Progressing",
        "SecretNotFound: words",
    ),
    "the store refuses": (
        task(condition("UploadBlocked", reason="AccessDenied"), state="UploadBlocked"),
        "Degraded",
        "AccessDenied: words",
    ),
}


@pytest.mark.parametrize("case", TASKS)
def test_health_of_a_task(case: str) -> None:
    obj, status, message = TASKS[case]
    assert health("lora-task.lua", obj) == (status, message)


PIPELINES: dict[str, tuple[dict[str, Any], str, str]] = {
    "new": ({"metadata": {"name": "a"}, "spec": {}}, "Progressing", "no operator has processed it yet"),
    "ready": (task(condition("Ready"), state="Ready", activeTasks=3), "Healthy", "3 tasks train"),
    "idle": (
        task(condition("Ready", "False", "Idle"), state="Idle"),
        "Healthy",
        "idle; the next task starts the workers",
    ),
    "starting": (
        task(condition("Ready", "False", "PodNotStarting", "no GPU is free"), state="Starting"),
        "Progressing",
        "PodNotStarting: no GPU is free",
    ),
    "failed": (
        task(condition("Ready", "False", "RestartLimitReached"), state="Failed"),
        "Degraded",
        "RestartLimitReached: words",
    ),
    "its Secret may come with the same sync": (
        task(condition("Ready", "False", "SecretNotFound"), state="Failed"),
        "Progressing",
        "SecretNotFound: words",
    ),
    "stalled": (
        task(condition("Ready"), condition("Stalled", reason="NoProgress"), state="Ready"),
        "Degraded",
        "NoProgress: words",
    ),
    "the stall is over": (
        task(condition("Ready"), condition("Stalled", "False"), state="Ready"),
        "Healthy",
        "0 tasks train",
    ),
    "a change that was not seen": (
        task(condition("Ready"), generation=2, observedGeneration=1, state="Ready"),
        "Progressing",
        "the operator has not yet seen the last change",
    ),
}


@pytest.mark.parametrize("case", PIPELINES)
def test_health_of_a_pipeline(case: str) -> None:
    obj, status, message = PIPELINES[case]
    assert health("lora-pipeline.lua", obj) == (status, message)


def test_what_is_ignored_is_not_set_back_by_a_sync() -> None:
    spec = yaml.safe_load((FOLDER / "application.yaml").read_text())["spec"]
    assert spec["ignoreDifferences"]
    assert "RespectIgnoreDifferences=true" in spec["syncPolicy"]["syncOptions"]


@pytest.mark.parametrize(
    ("kind", "script"), [("LoRATask", "lora-task.lua"), ("LoRAPipeline", "lora-pipeline.lua")]
)
def test_the_config_map_has_the_same_scripts(kind: str, script: str) -> None:
    data = yaml.safe_load((FOLDER / "argocd-cm.yaml").read_text())["data"]
    assert data[f"resource.customizations.health.mlora.dev_{kind}"] == (FOLDER / script).read_text()
