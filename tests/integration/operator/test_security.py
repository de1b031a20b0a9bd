"""What the operator's account may not do, and that workers have none: asked of the real API server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.manifests.owner import Owner
from mlora_operator.manifests.statefulset import pod_template
from mlora_operator.settings import WorkerDefaults
from tests.cluster import gobinaries
from tests.cluster.command import CommandFailed, run
from tests.fixtures.kubectl import Kubectl

pytestmark = pytest.mark.integration

CHART = Path(__file__).parents[3] / "charts" / "mlora-operator"
RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")

# verb, group, resource with its subresource, name
Question = tuple[str, str, str, str]
NEEDED: tuple[Question, ...] = (
    ("watch", "mlora.dev", "loratasks", ""),
    ("get", "mlora.dev", "loratasks", "any"),
    ("get", "mlora.dev", "lorapipelines", "any"),
    *((verb, "apps", "statefulsets", "") for verb in ("list", "watch", "create")),
    *((verb, "", what, "") for what in ("services", "pods", "events") for verb in ("list", "watch")),
    ("delete", "mlora.dev", "loratasks", ""),
    ("patch", "mlora.dev", "loratasks/status", ""),
    ("create", "mlora.dev", "lorapipelines", ""),
    ("delete", "mlora.dev", "lorapipelines", ""),
    ("patch", "mlora.dev", "lorapipelines/status", ""),
    ("patch", "apps", "statefulsets", ""),
    ("create", "", "services", ""),
    ("delete", "", "pods", ""),
    ("get", "", "secrets", "any"),
    ("create", "", "secrets", ""),
    ("get", "", "configmaps", "any"),
    ("create", "", "events", ""),
    ("create", "networking.k8s.io", "networkpolicies", ""),
    ("patch", "networking.k8s.io", "networkpolicies", "any"),
)
FORBIDDEN: tuple[Question, ...] = (
    ("list", "", "secrets", ""),
    ("watch", "", "secrets", ""),
    ("update", "", "secrets", "any"),
    ("patch", "", "secrets", "any"),
    ("delete", "", "secrets", "any"),
    ("list", "", "configmaps", ""),
    ("update", "", "configmaps", "any"),
    ("create", "", "pods", ""),
    ("create", "", "pods/exec", "any"),
    ("create", "", "pods/attach", "any"),
    ("create", "", "pods/portforward", "any"),
    ("get", "", "pods/log", "any"),
    ("get", "", "pods", "any"),
    ("get", "apps", "statefulsets", "any"),
    ("get", "", "services", "any"),
    ("get", "", "events", "any"),
    ("get", "mlora.dev", "loratasks/status", "any"),
    ("update", "", "pods/ephemeralcontainers", "any"),
    ("deletecollection", "", "pods", ""),
    ("create", "", "serviceaccounts/token", "any"),
    ("create", "mlora.dev", "loratasks", ""),
    ("patch", "mlora.dev", "loratasks", "any"),
    ("deletecollection", "mlora.dev", "loratasks", ""),
    ("deletecollection", "mlora.dev", "lorapipelines", ""),
    ("delete", "apps", "statefulsets", "any"),
    ("create", "apps", "deployments", ""),
    ("patch", "apps", "deployments", "any"),
    ("delete", "", "services", "any"),
    ("delete", "", "events", "any"),
    ("create", "batch", "jobs", ""),
    ("patch", "coordination.k8s.io", "leases", "another"),
    ("delete", "coordination.k8s.io", "leases", "another"),
    ("delete", "networking.k8s.io", "networkpolicies", "any"),
    ("list", "networking.k8s.io", "networkpolicies", ""),
    ("create", "rbac.authorization.k8s.io", "rolebindings", ""),
    ("bind", "rbac.authorization.k8s.io", "clusterroles", "cluster-admin"),
    ("escalate", "rbac.authorization.k8s.io", "roles", ""),
)
FORBIDDEN_OF_THE_CLUSTER: tuple[Question, ...] = (
    ("list", "", "namespaces", ""),
    ("patch", "", "namespaces", "kube-system"),
    ("get", "", "nodes", ""),
    ("get", "", "nodes/proxy", ""),
    ("impersonate", "", "users", ""),
    ("patch", "apiextensions.k8s.io", "customresourcedefinitions", "loratasks.mlora.dev"),
    ("create", "admissionregistration.k8s.io", "validatingwebhookconfigurations", ""),
    ("get", "", "persistentvolumes", ""),
)


@dataclass(frozen=True)
class Account:
    kubectl: Kubectl
    namespace: str
    name: str

    def allowed(self, questions: tuple[Question, ...], namespace: str) -> list[Question]:
        """Those of ``questions`` that the API server answers with yes. One call for all."""
        user = f"system:serviceaccount:{self.namespace}:{self.name}"
        groups = [
            "system:serviceaccounts",
            f"system:serviceaccounts:{self.namespace}",
            "system:authenticated",
        ]
        reviews = [
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {
                    "user": user,
                    "groups": groups,
                    "resourceAttributes": {
                        "namespace": namespace,
                        "verb": verb,
                        "group": group,
                        "resource": resource.partition("/")[0],
                        "subresource": resource.partition("/")[2],
                        "name": name,
                    },
                },
            }
            for verb, group, resource, name in questions
        ]
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews})
        each = ("--output", 'jsonpath={.status.allowed}{"\\n"}')
        answers = self.kubectl("create", "--filename", "-", *each, stdin=text).split()
        assert set(answers) <= {"true", "false"}
        return [question for question, yes in zip(questions, answers, strict=True) if yes == "true"]


@pytest.fixture(params=["all namespaces", "named namespaces"])
def account(request: pytest.FixtureRequest, kubectl: Kubectl, namespace: str) -> Iterator[Account]:
    """The rights of a release, without its operator."""
    values: dict[str, Any] = {"fullnameOverride": f"rights-{namespace}", "crds": {"install": False}}
    if request.param == "named namespaces":
        values["watchNamespaces"] = [namespace]
    arguments = ("template", "rel", CHART, "--kube-version=1.34.4", "--namespace", namespace, "--values", "-")
    documents = list(yaml.safe_load_all(run(gobinaries.helm(), *arguments, stdin=json.dumps(values))))
    rights = [one for one in documents if one and one["kind"] in RIGHTS]
    kubectl.apply(*rights)
    yield Account(kubectl, namespace, values["fullnameOverride"])
    outside = [one for one in rights if one["kind"].startswith("ClusterRole")]
    kubectl("delete", *(f"{one['kind']}/{one['metadata']['name']}" for one in outside), "--wait=false")


def test_the_operator_may_do_what_it_needs_and_nothing_that_it_does_not(
    account: Account, request: pytest.FixtureRequest
) -> None:
    assert account.allowed(NEEDED, account.namespace) == list(NEEDED)
    assert account.allowed(FORBIDDEN, account.namespace) == []
    assert account.allowed(FORBIDDEN_OF_THE_CLUSTER, "") == []
    lease = (("patch", "coordination.k8s.io", "leases", account.name),)
    assert account.allowed(lease, account.namespace) == list(lease)

    elsewhere = account.allowed((*NEEDED, *FORBIDDEN, *lease), "default")
    everywhere = request.node.callspec.params["account"] == "all namespaces"
    assert elsewhere == (list(NEEDED) if everywhere else [])


def test_real_calls_with_the_operators_token_are_refused(account: Account, tmp_path: Path) -> None:
    """Not a question about rights, but the thing itself, as somebody would try who has got hold of the token."""
    inside = account.kubectl.within(account.namespace)
    inside.create(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"key": "sesame"}}
    )
    token = inside("create", "token", account.name, "--duration=10m").strip()
    config = json.loads(inside("config", "view", "--raw", "--minify", "--output", "json"))
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    stolen = tmp_path / "kubeconfig"
    stolen.write_text(json.dumps(config))

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [inside.program, "--kubeconfig", stolen, "--namespace", account.namespace, *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    known = call("get", "secret", "keys", "--output", "name")
    assert known.stdout.strip() == "secret/keys", known.stderr
    for refused in (
        ("get", "secrets"),
        ("delete", "secret", "keys"),
        ("create", "token", "default"),
        ("run", "a", "--image=a", "--restart=Never"),
    ):
        done = call(*refused)
        assert done.returncode != 0, refused
        assert "forbidden" in done.stderr.lower(), (refused, done.stderr)


def test_a_workers_pod_gets_no_credential_and_names_no_secret_in_its_environment(
    kubectl: Kubectl, namespace: str
) -> None:
    """The API server itself would mount a token into a pod: it is asked what it makes of a worker's."""
    spec = LoRAPipelineSpec.model_validate(
        {
            "model": {"name": "Org/Toy-1B", "uri": "s3://models/toy"},
            "storage": {"endpoint": "http://s3:8333", "secretRef": {"name": "keys"}},
        }
    )
    template = pod_template(Owner(namespace, "toy", "uid-1"), spec, WorkerDefaults(image="worker:1"), "json")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": "worker"},
        "spec": template["spec"],
    }
    inside = kubectl.within(namespace)
    text = json.dumps(pod)
    # The namespace enforces the restricted standard, so this is the proof that workers fit it, too.
    made = json.loads(
        inside("create", "--dry-run=server", "--output", "json", "--filename", "-", stdin=text)
    )["spec"]
    assert {source for volume in made["volumes"] for source in volume} == {"name", "secret", "emptyDir"}
    (container,) = made["containers"]
    assert not [one for one in container["volumeMounts"] if "serviceaccount" in one["mountPath"]]
    assert not [one for one in container["env"] if "secretKeyRef" in one.get("valueFrom", {})]
    assert "envFrom" not in container

    careless = {**pod, "spec": {**pod["spec"], "automountServiceAccountToken": True}}
    mounted = inside(
        "create", "--dry-run=server", "--output", "json", "--filename", "-", stdin=json.dumps(careless)
    )
    assert "/var/run/secrets/kubernetes.io/serviceaccount" in mounted, "the check would see it"

    loose = json.loads(text)
    del loose["spec"]["containers"][0]["securityContext"]
    with pytest.raises(CommandFailed, match="violates PodSecurity"):
        inside("create", "--dry-run=server", "--filename", "-", stdin=json.dumps(loose))
