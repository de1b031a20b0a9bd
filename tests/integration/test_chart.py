"""The chart, rendered by Helm's own program and judged by a real API server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlora_operator.settings import parse_settings
from tests.cluster import gobinaries
from tests.cluster.command import CommandFailed, run
from tests.fixtures.kubectl import Kubectl

pytestmark = pytest.mark.integration

CHART = Path(__file__).parents[2] / "charts" / "mlora-operator"

VALUES: dict[str, Any] = {
    "pipelineDefaults": {"stages": 2, "storage": {"endpoint": "http://s3.storage:8333"}},
    "models": [{"name": "m", "uri": "s3://models/m", "microbatchTokens": 1_000_000}],
    "watchNamespaces": ["team-a"],
    "replicas": 2,
    "podDisruptionBudget": {"enabled": True},
    # Monitors and rules are of CRDs that the test cluster has not.
    "metrics": {"workers": {"enabled": True}, "dashboard": {"enabled": True}},
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}]},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "commonLabels": {"team": "ml"},
}


@pytest.fixture(scope="module")
def helm() -> Path:
    return gobinaries.helm()


def rendered(helm: Path, namespace: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """What ``helm template`` makes of the chart."""
    # Without a cluster Helm assumes an old one.
    arguments = ("template", "rel", CHART, "--kube-version=1.34.4", "--namespace", namespace, "--values", "-")
    text = run(helm, *arguments, stdin=json.dumps(values))
    return [document for document in yaml.safe_load_all(text) if document]


def one(documents: list[dict[str, Any]], kind: str, name: str = "rel-mlora-operator") -> dict[str, Any]:
    (found,) = [
        document
        for document in documents
        if document["kind"] == kind and (kind == "Pod" or document["metadata"]["name"] == name)
    ]
    return found


def test_helm_lints_the_chart_without_a_word(helm: Path) -> None:
    run(helm, "lint", "--strict", CHART)


def test_values_that_the_operator_would_refuse_are_refused_by_helm(helm: Path) -> None:
    with pytest.raises(CommandFailed, match="stages"):
        rendered(helm, "x", {"models": [{"name": "m", "uri": "s3://models/m", "stages": "two"}]})


def test_numbers_reach_the_operator_as_they_are_in_the_values(helm: Path) -> None:
    text = one(rendered(helm, "x", VALUES), "ConfigMap")["data"]["settings.json"]
    (model,) = parse_settings(text, "settings.json").models
    assert (model.microbatch_tokens, model.stages) == (1_000_000, 2)


def test_the_api_server_takes_everything_that_the_chart_installs(
    helm: Path, kubectl: Kubectl, namespace: str
) -> None:
    """Field by field: a field that the server does not know is an error."""
    documents = rendered(helm, namespace, {**VALUES, "watchNamespaces": [namespace]})
    documents = [
        one for one in documents if one["kind"] != "Pod"
    ]  # of `helm test`; its account is not there yet
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    strictly = ("--dry-run=server", "--validate=strict")
    arguments = ("apply", "--server-side", "--force-conflicts", *strictly, "--filename", "-")
    answer = kubectl(*arguments, stdin=text)
    assert len(answer.splitlines()) == len(documents)


def test_a_restricted_namespace_admits_the_operators_pod_and_the_self_test(
    helm: Path, kubectl: Kubectl, namespace: str
) -> None:
    documents = rendered(helm, namespace, VALUES)
    specs = (one(documents, "Deployment")["spec"]["template"]["spec"], one(documents, "Pod")["spec"])
    pods = [
        # The account is not there in a dry run.
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"pod-{number}"},
            "spec": {**spec, "serviceAccountName": "default"},
        }
        for number, spec in enumerate(specs)
    ]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": pods})
    inside = kubectl.within(namespace)
    inside("create", "--dry-run=server", "--validate=strict", "--filename", "-", stdin=text)
