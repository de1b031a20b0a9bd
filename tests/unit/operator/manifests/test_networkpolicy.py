"""What a pipeline's policy lets in and out, asked of its own rules: the selectors are evaluated as a network would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.manifests.names import labels
from mlora_operator.manifests.networkpolicy import NAMESPACE_NAME, is_open, network_policy
from mlora_operator.manifests.owner import Owner
from mlora_operator.settings import NetworkPolicySettings

OPERATOR = {"app.kubernetes.io/name": "mlora-operator", "app.kubernetes.io/component": "operator"}
STORE = {
    "to": [{"podSelector": {"matchLabels": {"app": "s3"}}}],
    "ports": [{"protocol": "TCP", "port": 8333}],
}
SPEC = LoRAPipelineSpec.model_validate({"model": {"name": "m", "uri": "s3://models/m"}})
SETTINGS = NetworkPolicySettings(enabled=True, operator_labels=OPERATOR, egress=(STORE,))


@dataclass(frozen=True)
class Pod:
    namespace: str
    labels: dict[str, str]


OWN = Pod("team-a", labels("first"))
OTHER_PIPELINE = Pod("team-a", labels("second"))
SAME_NAME_ELSEWHERE = Pod("team-b", labels("first"))
THE_OPERATOR = Pod("mlora-system", OPERATOR)
FALSE_OPERATOR = Pod("team-a", OPERATOR)
STRANGER = Pod("team-a", {"app": "anything"})
S3 = Pod("team-a", {"app": "s3"})


def selects(selector: dict[str, Any] | None, found: dict[str, str]) -> bool:
    if selector is None:
        return True
    exact = all(found.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return exact and all(
        one["operator"] == "In" and found.get(one["key"]) in one["values"]
        for one in selector.get("matchExpressions", ())
    )


def is_peer(peer: dict[str, Any], pod: Pod, home: str) -> bool:
    if "namespaceSelector" in peer:
        there = selects(peer["namespaceSelector"], {NAMESPACE_NAME: pod.namespace})
    else:
        there = pod.namespace == home
    return there and selects(peer.get("podSelector"), pod.labels)


def allows(rules: list[dict[str, Any]], side: str, pod: Pod, port: int, protocol: str = "TCP") -> bool:
    """A rule without peers is about everybody, one without ports about every port."""
    for rule in rules:
        peers, ports = rule.get(side), rule.get("ports")
        somebody = peers is None or any(is_peer(peer, pod, OWN.namespace) for peer in peers)
        some_port = ports is None or any((p["protocol"], p["port"]) == (protocol, port) for p in ports)
        if somebody and some_port:
            return True
    return False


def policy() -> dict[str, Any]:
    owner = Owner(OWN.namespace, "first", "uid-1")
    return network_policy(owner, SPEC, SETTINGS, "mlora-system")


@pytest.mark.parametrize(
    ("who", "pod", "port", "let_in"),
    [
        ("a rank of the pipeline", OWN, 29500, True),
        ("a rank, on a port that torch.distributed chose", OWN, 43211, True),
        ("a rank of another pipeline", OTHER_PIPELINE, 29500, False),
        ("a rank of another pipeline, at the coordinator", OTHER_PIPELINE, 8080, False),
        ("a pipeline of the same name in another namespace", SAME_NAME_ELSEWHERE, 29500, False),
        ("the operator", THE_OPERATOR, 8080, True),
        ("the operator, at the links", THE_OPERATOR, 29400, False),
        ("a pod elsewhere with the operator's labels", FALSE_OPERATOR, 8080, False),
        ("any other pod", STRANGER, 8080, False),
    ],
)
def test_who_is_let_in(who: str, pod: Pod, port: int, let_in: bool) -> None:
    assert allows(policy()["spec"]["ingress"], "from", pod, port) is let_in, who


@pytest.mark.parametrize(
    ("to", "pod", "port", "protocol", "let_out"),
    [
        ("a rank of the pipeline", OWN, 43211, "TCP", True),
        ("a rank of another pipeline", OTHER_PIPELINE, 29500, "TCP", False),
        ("names of hosts", STRANGER, 53, "UDP", True),
        ("the store that a value names", S3, 8333, "TCP", True),
        ("another port of it", S3, 22, "TCP", False),
        ("the operator", THE_OPERATOR, 8081, "TCP", False),
    ],
)
def test_where_workers_may_go(to: str, pod: Pod, port: int, protocol: str, let_out: bool) -> None:
    assert allows(policy()["spec"]["egress"], "to", pod, port, protocol) is let_out, to


def test_it_is_about_the_pipelines_pods_and_goes_with_the_pipeline() -> None:
    made = policy()
    assert selects(made["spec"]["podSelector"], OWN.labels)
    assert not selects(made["spec"]["podSelector"], OTHER_PIPELINE.labels)
    assert made["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert made["metadata"]["ownerReferences"][0]["uid"] == "uid-1"


def test_policies_without_the_operators_labels_would_let_everybody_in_and_are_refused() -> None:
    with pytest.raises(ValueError, match="operatorLabels"):
        NetworkPolicySettings(enabled=True)


@pytest.mark.parametrize(
    ("story", "rule", "opens"),
    [
        ("the port", {"ports": [{"port": 9001}]}, True),
        ("a range with it", {"ports": [{"port": 9000, "endPort": 9002}]}, True),
        ("other ports", {"ports": [{"port": 9000}, {"port": 9002, "endPort": 9003}]}, False),
        ("a name, which may be this port's", {"ports": [{"port": "s3"}]}, True),
        ("all ports of somebody", {"to": [{"podSelector": {}}]}, True),
        ("a protocol's ports", {"ports": [{"protocol": "TCP"}]}, True),
    ],
)
def test_whether_a_port_is_open_by_some_rule(story: str, rule: dict[str, Any], opens: bool) -> None:
    settings = SETTINGS.model_copy(update={"egress": (rule,)})
    assert is_open(9001, SPEC, settings) is opens, story


def test_the_platforms_ports_and_the_pipelines_own_are_open_and_all_are_without_a_policy() -> None:
    own = LoRAPipelineSpec.model_validate(
        {"model": {"name": "m", "uri": "s3://models/m"}, "storage": {"endpoint": "http://s3:9001"}}
    )
    assert is_open(443, SPEC, SETTINGS)
    assert is_open(9001, own, SETTINGS)
    assert not is_open(9001, SPEC, SETTINGS)
    assert is_open(9001, SPEC, SETTINGS.model_copy(update={"enabled": False}))
