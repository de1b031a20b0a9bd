"""The chart, rendered by Helm's own program and judged by a real API server."""

from __future__ import annotations

import json
import subprocess
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


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] == kind]
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
    documents = rendered(helm, namespace, {**VALUES, "watchNamespaces": [namespace]})
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    arguments = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--filename", "-")
    answer = kubectl(*arguments, stdin=text)
    assert len(answer.splitlines()) == len(documents)


def test_a_restricted_namespace_admits_the_operators_pod(
    helm: Path, kubectl: Kubectl, namespace: str
) -> None:
    template = one(rendered(helm, namespace, VALUES), "Deployment")["spec"]["template"]
    # The account is not there in a dry run.
    spec = {**template["spec"], "serviceAccountName": "default"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": spec}
    inside = kubectl.within(namespace)
    inside("create", "--dry-run=server", "--filename", "-", stdin=json.dumps(pod))


def test_the_service_account_may_do_what_it_needs_and_no_more(
    helm: Path, kubectl: Kubectl, namespace: str
) -> None:
    """Asked of the API server itself; the release is installed without its Deployment's image being pulled."""
    documents = rendered(helm, namespace, {"watchNamespaces": [namespace], "crds": {"install": False}})
    wanted = [one for one in documents if one["kind"] not in ("Deployment", "ConfigMap")]
    for document in wanted:  # other tests install a release of the same name
        if document["kind"].startswith("ClusterRole"):
            document["metadata"]["name"] = f"{namespace}-{document['metadata']['name']}"
        if document["kind"].endswith("Binding"):
            document["roleRef"]["name"] = f"{namespace}-{document['roleRef']['name']}"
    kubectl.apply(*wanted)
    account = f"--as=system:serviceaccount:{namespace}:{one(documents, 'ServiceAccount')['metadata']['name']}"

    def may(verb: str, resource: str, *where: str) -> bool:
        question = ("auth", "can-i", verb, resource, account, *where)
        command = [kubectl.program, "--kubeconfig", kubectl.kubeconfig, *question]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() == "yes"

    try:
        here, elsewhere = f"--namespace={namespace}", "--namespace=default"
        assert may("watch", "loratasks.mlora.dev", here)
        assert may("patch", "loratasks.mlora.dev", here, "--subresource=status")
        assert not may("patch", "loratasks.mlora.dev", here)
        assert may("create", "lorapipelines.mlora.dev", here)
        assert may("get", "secrets", here)
        assert not may("list", "secrets", here)
        assert not may("delete", "loratasks.mlora.dev", here)
        assert not may("create", "pods", here)
        assert not may("get", "secrets", elsewhere)
        assert not may("watch", "loratasks.mlora.dev", elsewhere)
    finally:
        for document in wanted:
            if document["kind"].startswith("ClusterRole"):
                kubectl("delete", document["kind"], document["metadata"]["name"], "--wait=false")
