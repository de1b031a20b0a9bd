"""`mlora list`: a table for people, objects as kubectl prints them for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from mlora_operator.cli import exit_codes
from mlora_operator.local.manifests import read_manifests
from tests.fixtures.kube_server import KubeServer
from tests.fixtures.spoken import mlora

TRAINING = {
    "state": "Training",
    "reason": "Training",
    "step": 6,
    "totalSteps": 10,
    "loss": "1.2345",
    "tokensPerSecond": "50",
    "pipeline": "team/base",
    "eta": "1m20s",
}


@pytest.fixture(autouse=True)
def tasks(kube: KubeServer) -> None:
    kube.task("b", TRAINING)
    kube.task("a")
    kube.task("far", namespace="other")


def cells(line: str) -> list[str]:
    return re.split(r" {3,}", line.strip())


def test_a_table_has_state_step_loss_eta_model_and_age() -> None:
    names, first, second = mlora("list").out.splitlines()
    assert cells(names) == ["NAME", "STATE", "REASON", "STEP", "LOSS", "ETA", "BASE MODEL", "AGE"]
    assert cells(first)[:3] == ["a", "Pending", "acme/base"]
    assert cells(second)[:7] == ["b", "Training", "Training", "6/10", "1.2345", "1m20s", "acme/base"]
    assert [line.index("acme/base") for line in (first, second)] == [names.index("BASE MODEL")] * 2


def test_all_namespaces_are_named_in_a_column() -> None:
    names, *rows = mlora("list", "-A").out.splitlines()
    assert cells(names)[:2] == ["NAMESPACE", "NAME"]
    assert [cells(line)[:2] for line in rows] == [["other", "far"], ["team", "a"], ["team", "b"]]


def test_wide_shows_more_and_is_not_cut_at_the_width_of_a_pipe() -> None:
    names, _, second = mlora("list", "-o", "wide").out.splitlines()
    assert cells(names)[-4:] == ["PRIORITY", "PIPELINE", "TOKENS/S", "ADAPTER"]
    assert cells(second)[-3:] == ["0", "team/base", "50"]


@pytest.mark.parametrize("format", ["json", "yaml"])
def test_objects_are_printed_as_kubectl_does_and_can_be_read_again(format: str) -> None:
    out = mlora("list", "-o", format).out
    found = json.loads(out) if format == "json" else yaml.safe_load(out)
    assert (found["apiVersion"], found["kind"]) == ("v1", "List")
    assert [(one["kind"], one["metadata"]["name"]) for one in found["items"]] == [
        ("LoRATask", "a"),
        ("LoRATask", "b"),
    ]
    assert "managedFields" not in out
    assert found["items"][1]["status"] == TRAINING
    read = read_manifests([("list", out)])
    assert (list(read.problems), len(read.tasks)) == ([], 2)


def test_names_are_printed_alone() -> None:
    assert mlora("list", "-o", "name").out == "loratask.mlora.dev/a\nloratask.mlora.dev/b\n"


def test_pipelines_have_a_table_of_their_own(kube: KubeServer) -> None:
    status = {
        "state": "Ready",
        "readyReplicas": 2,
        "activeTasks": 3,
        "waitingTasks": 1,
        "update": "Pending",
        "conditions": [{"type": "Ready", "status": "True", "reason": "Ready"}],
    }
    kube.has("lorapipelines", "base", {"model": {"name": "acme/base"}, "stages": 2}, status)
    names, one = mlora("list", "--pipelines").out.splitlines()
    assert cells(names) == [
        "NAME",
        "STATE",
        "REASON",
        "READY",
        "ACTIVE",
        "WAITING",
        "UPDATE",
        "BASE MODEL",
        "AGE",
    ]
    assert cells(one)[:8] == ["base", "Ready", "Ready", "2/2", "3", "1", "Pending", "acme/base"]
    assert mlora("list", "--pipelines", "-o", "name").out == "lorapipeline.mlora.dev/base\n"


def test_an_empty_namespace_is_no_error_and_leaves_standard_output_empty() -> None:
    said = mlora("list", "-n", "empty")
    assert (said.code, said.out) == (0, "")
    assert "there are no loratasks in namespace 'empty'" in said.err
    assert json.loads(mlora("list", "-n", "empty", "-o", "json").out)["items"] == []


def test_another_kubeconfig_can_be_named(
    kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = kube.kubeconfig(tmp_path / "other-config", namespace="other")
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert mlora("list", "-o", "name", "--kubeconfig", str(named)).out == "loratask.mlora.dev/far\n"
    missing = mlora("list", "--kubeconfig", "/nowhere/either")
    assert missing.code == exit_codes.UNREACHABLE
    assert "no kubeconfig at /nowhere/either" in missing.err


@pytest.mark.parametrize(("rejects", "reason"), [("True", "WorkersRejectTask"), ("False", "AllStagesLoaded")])
def test_a_pipeline_whose_workers_reject_the_plan_shows_that(
    kube: KubeServer, rejects: str, reason: str
) -> None:
    held = [
        {"type": "Ready", "status": "True", "reason": "AllStagesLoaded"},
        {"type": "PlanRejected", "status": rejects, "reason": "WorkersRejectTask"},
    ]
    status = {"state": "Ready", "conditions": held}
    kube.has("lorapipelines", "base", {"model": {"name": "acme/base"}, "stages": 1}, status)
    _, one = mlora("list", "--pipelines").out.splitlines()
    assert cells(one)[:3] == ["base", "Ready", reason]
