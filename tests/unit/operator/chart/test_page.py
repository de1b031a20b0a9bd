"""The chart's page: off by default; when it is on, only those who are named come to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlora_operator.settings import SettingsError, parse_settings
from tests.fixtures import helm

from .conftest import Objects

Render = Callable[[dict[str, Any]], Objects]
PROXY = {"podSelector": {"matchLabels": {"app": "oauth2-proxy"}}}
SELECTOR = {
    "app.kubernetes.io/name": "mlora-operator",
    "app.kubernetes.io/instance": "rel",
    "app.kubernetes.io/component": "operator",
}


def ports_of(objects: Objects) -> dict[str, int]:
    pod = objects["Deployment", "rel-mlora-operator"]["spec"]["template"]["spec"]
    return {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}


def policy_of(objects: Objects) -> dict[str, Any]:
    return objects["NetworkPolicy", "rel-mlora-operator-page"]["spec"]  # type: ignore[no-any-return]


def may_come(objects: Objects, port: int, peer: dict[str, Any] | None) -> bool:
    """Whether some rule of the policies for the operator's pods lets ``peer`` (None: one that nobody names) to ``port``."""
    for (kind, _), one in objects.items():
        if kind != "NetworkPolicy" or "Ingress" not in one["spec"]["policyTypes"]:
            continue
        assert one["spec"]["podSelector"] == {"matchLabels": SELECTOR}
        for rule in one["spec"].get("ingress", ()):
            fits = any(part["port"] <= port <= part.get("endPort", part["port"]) for part in rule["ports"])
            if fits and ("from" not in rule or not rule["from"] or peer in rule["from"]):
                return True
    return False


def test_it_is_off_by_default_and_leaves_nothing_behind(render: Render) -> None:
    objects = render({})
    assert "page" not in ports_of(objects)
    assert not [name for _, name in objects if name.endswith("-page")]
    text = objects["ConfigMap", "rel-mlora-operator"]["data"]["settings.json"]
    assert not parse_settings(text, "x").page.enabled


def test_the_operator_and_its_service_agree_on_the_port(render: Render) -> None:
    objects = render({"page": {"enabled": True, "port": 9999}})
    settings = parse_settings(objects["ConfigMap", "rel-mlora-operator"]["data"]["settings.json"], "x")
    service = objects["Service", "rel-mlora-operator-page"]["spec"]
    assert (settings.page.enabled, settings.page.port, ports_of(objects)["page"]) == (True, 9999, 9999)
    assert (service["ports"][0]["port"], service["ports"][0]["targetPort"]) == (9999, "page")
    assert service["selector"] == SELECTOR


def test_it_answers_under_its_services_names_and_those_that_are_given(render: Render) -> None:
    objects = render({"page": {"enabled": True, "hosts": ["mlora.example.org"]}})
    hosts = parse_settings(
        objects["ConfigMap", "rel-mlora-operator"]["data"]["settings.json"], "x"
    ).page.hosts
    name = objects["Service", "rel-mlora-operator-page"]["metadata"]["name"]
    inside = f"{name}.mlora-system"
    assert set(hosts) == {"mlora.example.org", name, inside, f"{inside}.svc", f"{inside}.svc.cluster.local"}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_only_those_who_are_named_come_to_it(render: Render, strict: bool, named: bool) -> None:
    values = {
        "page": {"enabled": True, "from": [PROXY] if named else []},
        "networkPolicy": {"enabled": strict},
    }
    objects = render(values)
    assert not may_come(objects, 8082, None)
    assert may_come(objects, 8082, PROXY) is named
    # Its own policy neither opens nor closes another port.
    del objects["NetworkPolicy", "rel-mlora-operator-page"]
    before = {port: may_come(objects, port, None) for port in (8080, 8081, 8083)} if strict else {}
    objects = render(values)
    for port in (8080, 8081, 8083):
        assert may_come(objects, port, None) is (before[port] if strict else True), port


@pytest.mark.parametrize(
    "values",
    [
        {"page": {"enabled": "yes"}},
        {"page": {"port": 0}},
        {"page": {"from": {}}},
        {"page": {"from": [{}]}},
        {"page": {"auth": True}},
    ],
)
def test_helm_refuses_what_would_not_work(chart: helm.Chart, values: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="page"):
        chart.validate_schema(chart.merge_values(values))


@pytest.mark.parametrize("port", [8081, 8080])
def test_the_operator_refuses_a_port_that_another_of_its_servers_has(port: int) -> None:
    text = f"{{namespace: n, worker: {{image: i}}, metrics: {{enabled: true}}, page: {{enabled: true, port: {port}}}}}"
    with pytest.raises(SettingsError, match=r"page\.port"):
        parse_settings(text, "settings.yaml")
    parse_settings(text.replace("page: {enabled: true", "page: {enabled: false"), "settings.yaml")
