"""Who may talk to a pipeline's workers, and to whom they may. Pure.

One policy for each pipeline, not one for all: "another rank of the same pipeline" cannot be said by labels that are the
same for all pipelines.
"""

from __future__ import annotations

from typing import Any

from mlora_operator.manifests.names import selector
from mlora_operator.manifests.owner import Owner, metadata
from mlora_operator.manifests.worker import HTTP_PORT
from mlora_operator.settings import NetworkPolicySettings

NAMESPACE_NAME = "kubernetes.io/metadata.name"  # a label that the API server itself puts on each namespace


def network_policy(owner: Owner, settings: NetworkPolicySettings, operator_namespace: str) -> dict[str, Any]:
    """The node's probes need no rule: a policy never keeps a pod's own node away.

    Between ranks all ports are open, since torch.distributed chooses some by itself.
    """
    same_pipeline = {"podSelector": {"matchLabels": selector(owner.name)}}
    operator = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: operator_namespace}},
        "podSelector": {"matchLabels": dict(settings.operator_labels)},
    }
    http = [{"protocol": "TCP", "port": HTTP_PORT}]
    ingress: list[dict[str, Any]] = [{"from": [same_pipeline]}, {"from": [operator], "ports": http}]
    names_of_hosts = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(owner, owner.child),
        "spec": {
            "podSelector": {"matchLabels": selector(owner.name)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [*ingress, *settings.ingress],
            "egress": [{"to": [same_pipeline]}, {"ports": names_of_hosts}, *settings.egress],
        },
    }
