"""Who may talk to a pipeline's workers, and to whom they may. Pure.

One policy for each pipeline, not one for all: "another rank of the same pipeline" cannot be said by labels that are the
same for all pipelines.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.manifests.names import selector
from mlora_operator.manifests.owner import Owner, metadata
from mlora_operator.manifests.worker import HTTP_PORT
from mlora_operator.settings import NetworkPolicySettings
from mlora_worker.protocol import METADATA_SERVICES

NAMESPACE_NAME = "kubernetes.io/metadata.name"  # a label that the API server itself puts on each namespace

_EVERYWHERE = {"IPv4": "0.0.0.0/0", "IPv6": "::/0"}
# Where clouds serve a machine's credentials: link-local addresses, also as a gateway between the families spells them, and
# single addresses elsewhere.
_NEVER = {
    "IPv4": ("169.254.0.0/16", *(f"{one}/32" for one in METADATA_SERVICES if one.version == 4)),
    "IPv6": (
        "fe80::/10",
        "64:ff9b::a9fe:0/112",
        *(f"{one}/128" for one in METADATA_SERVICES if one.version == 6),
    ),
}
_PORT_OF = {"http": 80, "https": 443}
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_SERVICES = "AWS_ENDPOINT_URL"  # and those of one service, such as AWS_ENDPOINT_URL_STS


def network_policy(
    owner: Owner, spec: LoRAPipelineSpec, settings: NetworkPolicySettings, operator_namespace: str
) -> dict[str, Any]:
    """The node's probes need no rule: a policy never keeps a pod's own node away.

    Between ranks all ports are open, since torch.distributed chooses some by itself.
    """
    same_pipeline = {"podSelector": {"matchLabels": selector(owner.name)}}
    operator = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: operator_namespace}},
        "podSelector": {"matchLabels": dict(settings.operator_labels)},
    }
    ingress: list[dict[str, Any]] = [
        {"from": [same_pipeline]},
        {"from": [operator], "ports": _ports("TCP", {HTTP_PORT})},
    ]
    dns = {"ports": _ports("UDP", settings.dns_ports) + _ports("TCP", settings.dns_ports)}
    egress: list[dict[str, Any]] = [{"to": [same_pipeline]}]
    if settings.dns_ports:  # a rule without ports is about all of them
        egress.append(dns)
    if outside := {*settings.ports, *own_ports(spec)}:
        everywhere: list[dict[str, Any]] = [
            {"ipBlock": {"cidr": _EVERYWHERE[family], "except": list(_NEVER[family])}}
            for family in ("IPv4", "IPv6")
        ]
        everywhere += [{"ipBlock": {"cidr": network}} for network in spec.worker.allowed_networks]
        egress.append({"to": everywhere, "ports": _ports("TCP", outside)})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(owner, owner.child),
        "spec": {
            "podSelector": {"matchLabels": selector(owner.name)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [*ingress, *settings.ingress],
            "egress": [*egress, *settings.egress],
        },
    }


def own_ports(spec: LoRAPipelineSpec) -> frozenset[int]:
    """Ports that the pipeline itself names: of its store, its model's or hub's address, and proxies. Who makes a pipeline
    chooses the image that runs there, so it is not the policy that could keep them from a port. Tasks' ports are not
    opened: who makes a task shall reach no more than the platform has chosen.
    """
    addresses = [spec.storage.endpoint, spec.model.uri, spec.worker.hub_endpoint]
    addresses += [
        str(one.get("value") or "")
        for one in spec.worker.env
        if str(one.get("name")).upper() in _PROXIES or str(one.get("name")).startswith(_SERVICES)
    ]
    return frozenset(port for one in addresses if one and (port := port_of(one)) is not None)


def port_of(address: str) -> int | None:
    """The port that an HTTP address leads to; of one without a scheme, as of a proxy, HTTP's. None for other addresses."""
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        return parts.port or _PORT_OF.get(parts.scheme)
    except ValueError:
        return None


def is_open(port: int, spec: LoRAPipelineSpec, settings: NetworkPolicySettings) -> bool:
    """Whether workers may go to this port somewhere, as far as their own policy says."""
    return (
        not settings.enabled
        or port in settings.ports
        or port in own_ports(spec)
        or any(_covers(rule, port) for rule in settings.egress)
    )


def _covers(rule: dict[str, Any], port: int) -> bool:
    """A port's name says nothing without the pod that has it, so it may be this one."""
    ports = rule.get("ports") or [{}]
    return any(port in _range(one) for one in ports)


def _range(of: dict[str, Any]) -> range:
    first, last = of.get("port"), of.get("endPort")
    if not isinstance(first, int):
        return range(1, 65536)
    return range(first, (last if isinstance(last, int) else first) + 1)


def _ports(protocol: str, ports: Iterable[int]) -> list[dict[str, Any]]:
    return [{"protocol": protocol, "port": port} for port in sorted(ports)]
