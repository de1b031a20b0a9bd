"""What the chart installs for Prometheus and Grafana, and that it fits what operator and workers really have."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.manifests.networkpolicy import network_policy
from mlora_operator.manifests.owner import Owner
from mlora_operator.manifests.statefulset import statefulset
from mlora_operator.settings import Settings, parse_settings
from mlora_worker.protocol import WorkerConfig
from tests.fixtures import helm

from .conftest import CHART, Objects

Render = Callable[[dict[str, Any]], Objects]

NAME = "rel-mlora-operator"
ALL = {
    "workers": {"enabled": True, "port": 9101},
    "serviceMonitor": {"enabled": True, "labels": {"release": "kube-prometheus"}, "interval": "15s"},
    "podMonitor": {"enabled": True, "scrapeTimeout": "5s"},
    "rules": {"enabled": True, "labels": {"release": "kube-prometheus"}},
    "dashboard": {"enabled": True, "annotations": {"grafana_folder": "ML"}},
}
PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
SCRAPED = {"metrics": ALL, "networkPolicy": {"metricsFrom": [PROMETHEUS]}}


def settings_of(objects: Objects) -> Settings:
    return parse_settings(objects["ConfigMap", NAME]["data"]["settings.json"], "settings.json")


def workers_of(objects: Objects) -> dict[str, Any]:
    """The StatefulSet that the operator makes with these settings."""
    spec = LoRAPipelineSpec.model_validate({"model": {"name": "m", "uri": "s3://models/m"}})
    return statefulset(Owner("team-a", "toy", "uid"), spec, 1, settings_of(objects).worker, "json")


def ports_of(container: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def test_by_default_the_operator_serves_metrics_and_nothing_is_asked_of_the_cluster(render: Render) -> None:
    objects = render({})
    assert {document.get("apiVersion") for document in objects.values()} & {
        "monitoring.coreos.com/v1"
    } == set()
    assert ("ConfigMap", f"{NAME}-dashboard") not in objects
    settings = settings_of(objects)
    assert (settings.metrics.enabled, settings.metrics.port, settings.metrics.tasks) == (True, 8080, False)
    (container,) = objects["Deployment", NAME]["spec"]["template"]["spec"]["containers"]
    assert ports_of(container) == {"health": 8081, "metrics": 8080}
    ports = {port["name"]: port["targetPort"] for port in objects["Service", NAME]["spec"]["ports"]}
    assert ports == {"health": "health", "metrics": "metrics"}
    assert "metrics" not in ports_of(workers_of(objects)["spec"]["template"]["spec"]["containers"][0])


def test_without_metrics_there_is_no_port(render: Render) -> None:
    objects = render({"metrics": {"enabled": False}})
    assert not settings_of(objects).metrics.enabled
    (container,) = objects["Deployment", NAME]["spec"]["template"]["spec"]["containers"]
    assert ports_of(container) == {"health": 8081}
    assert [port["name"] for port in objects["Service", NAME]["spec"]["ports"]] == ["health"]


def test_all_settings_of_metrics_reach_the_operator(render: Render) -> None:
    values = {"port": 9000, "tasks": True, "mostTasks": 7, "priorities": [-1, 5]}
    metrics = settings_of(render({"metrics": values})).metrics
    assert metrics.model_dump() == {
        "enabled": True, "port": 9000, "tasks": True, "most_tasks": 7, "priorities": (-1, 5),
    }  # fmt: skip


def test_the_service_monitor_finds_the_operators_service_and_its_port(render: Render) -> None:
    objects = render(SCRAPED)
    monitor, service = objects["ServiceMonitor", NAME], objects["Service", NAME]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["metadata"]["namespace"] == service["metadata"]["namespace"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint == {"port": "metrics", "path": "/metrics", "interval": "15s"}
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert monitor["metadata"]["labels"]["release"] == "kube-prometheus"


def test_the_pod_monitor_finds_the_workers_and_their_port(render: Render) -> None:
    objects = render(SCRAPED)
    monitor, template = objects["PodMonitor", f"{NAME}-workers"], workers_of(objects)["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint == {"port": "metrics", "path": "/metrics", "scrapeTimeout": "5s"}
    (container,) = template["spec"]["containers"]
    assert ports_of(container)["metrics"] == 9101
    (config,) = [one["value"] for one in container["env"] if one["name"] == "MLORA_WORKER_CONFIG"]
    assert WorkerConfig.model_validate_json(config).metrics_port == 9101
    assert monitor["spec"]["namespaceSelector"] == {"any": True}


def test_workers_are_looked_for_where_the_operator_looks(render: Render) -> None:
    monitor = render({**SCRAPED, "watchNamespaces": ["team-a"]})["PodMonitor", f"{NAME}-workers"]
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["team-a", "mlora-system"]}


@pytest.mark.parametrize(
    ("metrics", "word"),
    [
        ({"enabled": False, "serviceMonitor": {"enabled": True}}, "serviceMonitor"),
        ({"podMonitor": {"enabled": True}}, "podMonitor"),
        ({"port": 80}, "port"),
        ({"priorities": []}, "priorities"),
        ({"serviceMonitor": {"interval": "15"}}, "interval"),
        ({"dashbord": {}}, "dashbord"),
    ],
)
def test_values_that_could_not_work_are_refused(render: Render, metrics: dict[str, Any], word: str) -> None:
    with pytest.raises(helm.HelmError, match=word):
        render({"metrics": metrics})


def test_rules_and_dashboard_are_installed_as_they_are_written(render: Render) -> None:
    objects = render(SCRAPED)
    written = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    rule = objects["PrometheusRule", NAME]
    assert rule["spec"] == written
    assert rule["metadata"]["labels"]["release"] == "kube-prometheus"
    board = objects["ConfigMap", f"{NAME}-dashboard"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert board["metadata"]["annotations"] == {"grafana_folder": "ML"}
    assert json.loads(board["data"]["mlora.json"]) == json.loads(
        (CHART / "files" / "dashboard.json").read_text()
    )


def ports_open_to(policy: dict[str, Any], peer: dict[str, Any]) -> set[int]:
    return {
        port["port"]
        for rule in policy["spec"]["ingress"]
        if peer in rule["from"]
        for port in rule.get("ports", [])
    }


def test_only_named_peers_may_scrape_and_they_get_no_other_port(render: Render) -> None:
    spec = LoRAPipelineSpec.model_validate({"model": {"name": "m", "uri": "s3://models/m"}})
    for peers, operators, workers in (([], set(), set()), ([PROMETHEUS], {8080}, {9101})):
        metrics = {"workers": ALL["workers"]}
        objects = render({"metrics": metrics, "networkPolicy": {"metricsFrom": peers}})
        settings = settings_of(objects)
        of_workers = network_policy(
            Owner("team-a", "toy", "uid"), spec, settings.network_policy, settings.namespace
        )
        assert ports_open_to(objects["NetworkPolicy", NAME], PROMETHEUS) == operators
        assert ports_open_to(of_workers, PROMETHEUS) == workers
        for policy in (objects["NetworkPolicy", NAME], of_workers):
            assert all(rule["from"] for rule in policy["spec"]["ingress"]), (
                "an empty one would let everybody in"
            )


def test_workers_without_metrics_are_not_started_anew_by_an_upgrade(render: Render) -> None:
    (container,) = workers_of(render({}))["spec"]["template"]["spec"]["containers"]
    (config,) = [one["value"] for one in container["env"] if one["name"] == "MLORA_WORKER_CONFIG"]
    assert "metricsPort" not in config


@pytest.mark.parametrize("monitor", ["serviceMonitor", "podMonitor"])
def test_a_monitor_that_the_network_policy_would_leave_without_an_answer_is_refused(
    render: Render, monitor: str
) -> None:
    metrics = {"workers": {"enabled": True}, monitor: {"enabled": True}}
    with pytest.raises(helm.HelmError, match=r"say in networkPolicy\.metricsFrom who may"):
        render({"metrics": metrics})
    assert render({"metrics": metrics, "networkPolicy": {"enabled": False}})
    assert render({"metrics": metrics, "networkPolicy": {"metricsFrom": [PROMETHEUS]}})
