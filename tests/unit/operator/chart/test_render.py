"""What the chart installs, for several values."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from itertools import product
from typing import Any

import pytest
import yaml

from mlora_operator.api import crd
from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.manifests.networkpolicy import network_policy
from mlora_operator.manifests.owner import Owner
from mlora_operator.settings import Settings, parse_settings
from mlora_worker.protocol import METADATA_SERVICES
from tests.fixtures import helm

from .conftest import CHART, Objects

Render = Callable[..., Objects]

MODEL = {"name": "HuggingFaceTB/SmolLM2-135M-Instruct", "uri": "s3://models/smollm2-135m"}


def settings_of(objects: Objects) -> Settings:
    text = objects["ConfigMap", "rel-mlora-operator"]["data"]["settings.json"]
    return parse_settings(text, "settings.json")


def pod_of(objects: Objects) -> dict[str, Any]:
    deployment = objects["Deployment", "rel-mlora-operator"]
    return deployment["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def rules_of(objects: Objects, name: str) -> set[tuple[str, str, str]]:
    """(group, resource, verb) that a ClusterRole allows."""
    return {
        (group, resource, verb)
        for rule in objects["ClusterRole", name]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_helm_finds_nothing_to_complain_about() -> None:
    report = helm.lint(CHART, strict=True)
    assert [message for message in report["messages"] if message["severity"] > 1] == []


def test_the_default_values_make_settings_that_the_operator_takes(render: Render) -> None:
    settings = settings_of(render({}))
    assert settings.namespace == "mlora-system"
    assert settings.namespaces == ()
    assert settings.worker.image == "mlora-worker:0.1.0"
    assert settings.models == ()
    assert not settings.rights.serves_others("team-a")
    assert settings.network_policy.enabled


def test_the_chart_has_one_version_with_what_it_installs() -> None:
    """Until the first release, all of it is the first version."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    package = tomllib.loads((CHART.parents[1] / "pyproject.toml").read_text())["project"]["version"]
    changes = (CHART.parents[1] / "CHANGELOG.md").read_text()
    assert chart["version"] == chart["appVersion"] == package
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == package


def test_catalogue_entries_take_over_the_defaults_and_override_them(render: Render) -> None:
    objects = render(
        {
            "pipelineDefaults": {
                "stages": 2,
                "recomputeActivations": True,
                "storage": {"endpoint": "http://s3.storage:8333", "secretRef": {"name": "models"}},
                "worker": {"threads": 1, "resources": {"limits": {"cpu": 2}}},
            },
            "models": [MODEL, {**MODEL, "name": "big", "stages": 4, "worker": {"threads": 8}}],
        }
    )
    small, big = settings_of(objects).models
    assert (small.stages, small.worker.threads) == (2, 1)
    assert (big.stages, big.worker.threads) == (4, 8)
    assert big.worker.resources == {"limits": {"cpu": 2}}
    assert big.storage.endpoint == "http://s3.storage:8333"
    assert big.pipeline_spec().stages == 4
    assert big.pipeline_spec().recompute_activations


@pytest.mark.parametrize("number", [1_000_000, 1_048_576, 16])
def test_large_numbers_survive_helm(render: Render, number: int) -> None:
    (model,) = settings_of(render({"models": [{**MODEL, "microbatchTokens": number}]})).models
    assert model.microbatch_tokens == number


def test_small_numbers_survive_helm(render: Render) -> None:
    (model,) = settings_of(render({"models": [{**MODEL, "memory": {"margin": 0.00001}}]})).models
    assert model.memory.margin == 0.00001


def test_all_settings_reach_the_operator(render: Render) -> None:
    objects = render(
        {
            "watchNamespaces": ["team-a"],
            "serving": {"namespaces": ["ml-platform"]},
            "priorities": {"default": {"max": 10}, "namespaces": {"team-a": {"max": 1_000_000}}},
            "outputs": {"prefixes": {"team-a": ["s3://adapters/team-a"]}},
            "imagePullSecrets": [{"name": "key"}],
            "worker": {"image": {"repository": "registry/worker", "tag": "7", "pullPolicy": "Never"}},
            "log": {"format": "text", "level": "debug"},
            "health": {"port": 9000, "maxSilenceSeconds": 30},
            "allowFileUris": True,
            "coordinatorTls": False,
            "coordinatorUrl": "http://{name}.example:{port}",
            "networkPolicy": {
                "enabled": False,
                "workerPorts": [8443],
                "dnsPorts": [5353],
                "workerEgress": [{}],
            },
        }
    )
    settings = settings_of(objects)
    assert settings.namespaces == ("mlora-system", "team-a")
    assert settings.serving.namespaces == ("ml-platform",)
    assert [settings.rights.reach(one) for one in ("team-a", "team-b")] == [1_000_000, 10]
    assert settings.rights.prefixes_of("team-a") == ("s3://adapters/team-a",)
    assert settings.worker.model_dump() == {
        "image": "registry/worker:7",
        "image_pull_policy": "Never",
        "image_pull_secrets": ({"name": "key"},),
        "metrics_port": None,
        "run_as_user": 65532,
    }
    assert (settings.log.format, settings.log.level) == ("text", "debug")
    assert (settings.health.port, settings.health.max_silence_seconds) == (9000, 30)
    assert settings.allow_file_uris
    assert settings.coordinator_tls is False
    assert settings.coordinator_url == "http://{name}.example:{port}"
    assert settings.leader_election.lease_name == "rel-mlora-operator"
    policy = settings.network_policy
    assert (policy.enabled, policy.ports, policy.dns_ports, policy.egress) == (False, (8443,), (5353,), ({},))


def test_the_pod_fits_the_restricted_pod_security_standard(render: Render) -> None:
    pod = pod_of(render({}))
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for volume in pod["volumes"]:
        assert set(volume) & {"configMap", "emptyDir"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


def test_a_new_pod_is_ready_before_the_old_one_goes_and_both_know_their_names(render: Render) -> None:
    objects = render({"health": {"port": 9000}, "replicas": 2, "leaderElection": {"leaseSeconds": 30}})
    spec = objects["Deployment", "rel-mlora-operator"]["spec"]
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert (spec["replicas"], spec["strategy"]) == (2, rolling)
    elects = settings_of(objects).leader_election
    assert (elects.lease_name, elects.lease_seconds, elects.deadline_seconds) == (
        "rel-mlora-operator",
        30,
        10,
    )
    (container,) = pod_of(objects)["containers"]
    assert {"name": "health", "containerPort": 9000} in container["ports"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "health"}


def test_the_settings_file_is_where_the_environment_says(render: Render) -> None:
    objects = render({})
    (container,) = pod_of(objects)["containers"]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert environment["MLORA_SETTINGS"] == f"{mounts['settings']}/settings.json"
    assert "settings.json" in objects["ConfigMap", "rel-mlora-operator"]["data"]


def test_new_settings_start_a_new_pod(render: Render) -> None:
    def annotations(values: dict[str, Any]) -> Any:
        deployment = render(values)["Deployment", "rel-mlora-operator"]
        return deployment["spec"]["template"]["metadata"]["annotations"]

    assert annotations({}) == annotations({"log": {}})  # the same, rendered again
    assert annotations({}) != annotations({"log": {"level": "debug"}})


def test_extra_pod_fields_are_added_to_its_own(render: Render) -> None:
    pod = pod_of(
        render(
            {
                "command": ["python"],
                "args": ["-m", "mlora_operator"],
                "env": [{"name": "A", "value": "b"}],
                "volumes": [{"name": "more", "emptyDir": {}}],
                "volumeMounts": [{"name": "more", "mountPath": "/more"}],
                "nodeSelector": {"disk": "ssd"},
                "tolerations": [{"operator": "Exists"}],
                "priorityClassName": "high",
            }
        )
    )
    (container,) = pod["containers"]
    assert (container["command"], container["args"]) == (["python"], ["-m", "mlora_operator"])
    assert [variable["name"] for variable in container["env"]] == ["MLORA_SETTINGS", "MLORA_POD_NAME", "A"]
    assert [volume["name"] for volume in pod["volumes"]] == ["settings", "tmp", "more"]
    assert pod["nodeSelector"] == {"disk": "ssd"}
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["priorityClassName"] == "high"


def test_the_rules_are_the_least_that_the_operator_needs(render: Render) -> None:
    rules = rules_of(render({}), "rel-mlora-operator")
    everything = {verb for _, _, verb in rules} | {group for group, _, _ in rules} | {r for _, r, _ in rules}
    assert "*" not in everything
    verbs = {
        of: frozenset(verb for _, resource, verb in rules if resource == of)
        for of in {resource for _, resource, _ in rules}
    }
    applied, watched = {"create", "patch"}, {"list", "watch"}
    assert verbs == {
        "loratasks": watched | {"get", "delete"},
        "lorapipelines": watched | applied | {"get", "delete"},
        "loratasks/status": {"patch"},
        "lorapipelines/status": {"patch"},
        "statefulsets": watched | applied,
        "services": watched | applied,
        "pods": watched | {"delete"},
        "events": watched | {"create"},
        "secrets": {"get", "create"},
        "configmaps": {"get"},
        "networkpolicies": applied,
    }


def test_the_page_about_security_has_the_rules_as_they_are(render: Render) -> None:
    page = (CHART.parents[1] / "docs" / "operators" / "security.md").read_text()
    table = re.search(r"(?:^\|.*\n)+", page.partition("## Rights")[2], re.MULTILINE)
    assert table is not None
    told = set()
    for line in table[0].splitlines()[2:]:
        what, verbs, _ = (cell.strip() for cell in line.strip("|").split("|"))
        for resource in re.findall(r"`([^`]+)`", what):
            if resource not in ("leases", "namespaces"):  # of rules of their own
                told |= {(resource, verb) for verb in re.split(r", ", verbs)}
    real = rules_of(render({}), "rel-mlora-operator")
    assert told == {(resource, verb) for _, resource, verb in real}


def test_all_namespaces_are_watched_through_one_cluster_binding(render: Render) -> None:
    objects = render({})
    assert ("ClusterRoleBinding", "rel-mlora-operator") in objects
    bindings = [name for kind, name in objects if kind == "RoleBinding"]
    assert bindings == ["mlora-system/rel-mlora-operator-leader"]


def test_named_namespaces_get_one_binding_each_and_no_rights_elsewhere(render: Render) -> None:
    objects = render({"watchNamespaces": ["team-a", "team-b", "mlora-system"]})
    bound = {name.split("/")[0] for kind, name in objects if kind == "RoleBinding"}
    assert bound == {"team-a", "team-b", "mlora-system"}
    assert [name for kind, name in objects if kind == "ClusterRoleBinding"] == ["rel-mlora-operator-cluster"]
    assert rules_of(objects, "rel-mlora-operator-cluster") == {("", "namespaces", "get")}


def test_every_binding_names_the_account_that_the_pod_runs_as(render: Render) -> None:
    for values in ({}, {"serviceAccount": {"create": False, "name": "mine"}}):
        objects = render(values)
        account = pod_of(objects)["serviceAccountName"]
        for (kind, _), document in objects.items():
            if kind.endswith("Binding"):
                subject = {"kind": "ServiceAccount", "name": account, "namespace": "mlora-system"}
                assert document["subjects"] == [subject]
        assert (("ServiceAccount", account) in objects) is (values == {})


def test_the_crds_are_installed_and_kept_on_uninstall(render: Render) -> None:
    objects = render({})
    for definition in (crd.task_crd(), crd.pipeline_crd()):
        installed = objects["CustomResourceDefinition", definition["metadata"]["name"]]
        assert installed["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert installed == definition


def test_the_crds_can_be_left_out(render: Render) -> None:
    objects = render({"crds": {"install": False}})
    assert not [key for key in objects if key[0] == "CustomResourceDefinition"]


def test_the_notes_name_the_models(render: Render) -> None:
    assert MODEL["name"] in render({"models": [MODEL]})["NOTES", ""]["text"]
    assert "create a LoRAPipeline" in render({})["NOTES", ""]["text"]
    text = render({"serving": {"namespaces": ["ml-platform"]}})["NOTES", ""]["text"]
    assert "namespace mlora-system or ml-platform" in text


def test_the_lease_is_the_only_one_that_the_operator_may_write(render: Render) -> None:
    objects = render({"leaderElection": {"leaseName": "mine"}})
    create, this = objects["Role", "rel-mlora-operator-leader"]["rules"]
    assert create == {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]}
    assert (this["resourceNames"], this["verbs"]) == (["mine"], ["get", "patch"])
    assert settings_of(objects).leader_election.lease_name == "mine"


def test_a_digest_goes_before_a_tag(render: Render) -> None:
    digest = "sha256:" + "0a" * 32
    image = {"repository": "registry/operator", "tag": "1", "digest": digest}
    objects = render({"image": image, "worker": {"image": {**image, "repository": "registry/worker"}}})
    assert pod_of(objects)["containers"][0]["image"] == f"registry/operator@{digest}"
    assert settings_of(objects).worker.image == f"registry/worker@{digest}"
    with pytest.raises(Exception, match="digest"):
        render({"image": {**image, "digest": "0a0a"}})


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in selector["matchLabels"].items())


def test_all_that_selects_the_operators_pods_selects_them_and_not_the_self_tests(render: Render) -> None:
    objects = render(
        {
            "podDisruptionBudget": {"enabled": True, "maxUnavailable": "50%"},
            "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}],
            "commonLabels": {"team": "ml"},
        }
    )
    name = "rel-mlora-operator"
    template = objects["Deployment", name]["spec"]["template"]
    own = template["metadata"]["labels"]
    selectors = [
        objects["PodDisruptionBudget", name]["spec"]["selector"],
        objects["NetworkPolicy", name]["spec"]["podSelector"],
        {"matchLabels": objects["Service", name]["spec"]["selector"]},
        {"matchLabels": settings_of(objects).network_policy.operator_labels},
        template["spec"]["topologySpreadConstraints"][0]["labelSelector"],
    ]
    tested = objects["Pod", f"{name}-selftest"]["metadata"]["labels"]
    for one in selectors:
        assert matches(one, own)
        assert not matches(one, tested)
    assert own["team"] == "ml"


def test_rights_to_make_network_policies_come_with_the_policies(render: Render) -> None:
    def verbs(enabled: bool) -> set[str]:
        rules = rules_of(render({"networkPolicy": {"enabled": enabled}}), "rel-mlora-operator")
        return {verb for _, resource, verb in rules if resource == "networkpolicies"}

    assert (verbs(True), verbs(False)) == ({"create", "patch"}, set())


def test_names_and_labels_that_are_numbers_stay_text(render: Render) -> None:
    """A build's number as the release's name; what YAML takes for a number the API server refuses."""
    values = {
        "nameOverride": "2026",
        "commonLabels": {"cost-centre": "4711"},
        "watchNamespaces": ["2026"],
        "priorityClassName": "100",
        "serviceAccount": {"name": "123"},
        "networkPolicy": {"metricsFrom": [{"podSelector": {}}]},
        "page": {"enabled": True},
        "metrics": {
            "serviceMonitor": {"enabled": True},
            "podMonitor": {"enabled": True},
            "workers": {"enabled": True},
            "rules": {"enabled": True},
        },
    }
    objects = render(values, "4711", "1234")
    assert len(objects) > 12
    for (kind, name), one in objects.items():
        if kind == "NOTES":
            continue
        metadata = one["metadata"]
        texts = [metadata["name"], metadata.get("namespace", ""), *metadata.get("labels", {}).values()]
        assert all(isinstance(text, str) for text in texts), f"{kind} {name}: {texts}"
    deployment = objects["Deployment", "mlora-4711-2026"]
    assert deployment["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == "4711"
    assert deployment["metadata"]["labels"]["cost-centre"] == "4711"
    pod = deployment["spec"]["template"]["spec"]
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("100", "123")
    assert ("RoleBinding", "2026/mlora-4711-2026") in objects
    settings = parse_settings(
        objects["ConfigMap", "mlora-4711-2026"]["data"]["settings.json"], "settings.json"
    )
    assert settings.network_policy.operator_labels["app.kubernetes.io/name"] == "2026"


@pytest.mark.parametrize(
    ("values", "release"),
    [
        ({}, "4711"),
        ({}, "team.a"),
        ({}, "9." + "a" * 51),
        ({"fullnameOverride": "null"}, "rel"),
        ({"fullnameOverride": "2026"}, "rel"),
        ({"fullnameOverride": "a" * 63}, "rel"),
    ],
)
def test_a_service_has_a_name_that_the_api_server_takes(
    render: Render, values: dict[str, Any], release: str
) -> None:
    """It must begin with a letter and has no dots; a release's name may have both."""
    found = render({**values, "page": {"enabled": True}}, release)
    names = [
        name for kind, name in found if kind in ("Service", "Deployment", "NetworkPolicy", "ServiceAccount")
    ]
    assert len(names) == 6
    for name in names:
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name), name


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"leaderElection": {"leaseSeconds": 8}},
            "deadlineSeconds must be less than leaderElection.leaseSeconds",
        ),
        ({"metrics": {"port": 8081}}, "health.port, metrics.port and page.port must differ"),
        ({"page": {"enabled": True, "port": 8080}}, "health.port, metrics.port and page.port must differ"),
        (
            {"metrics": {"workers": {"enabled": True, "port": 29400}}},
            "metrics.workers.port 29400 is a port that workers",
        ),
        ({"metrics": {"priorities": [0, 10, 5]}}, "metrics.priorities must ascend"),
        ({"coordinatorUrl": "http://{hots}:{port}"}, "coordinatorUrl"),
        ({"models": [MODEL, MODEL]}, f"models: {MODEL['name']} is defined twice"),
        ({"models": [{**MODEL, "uri": "hf://datasets/a"}]}, "uri is that of a data set"),
        ({"models": [{**MODEL, "replicas": {"min": 2}}]}, "replicas.min must not be more than replicas.max"),
        (
            {"pipelineDefaults": {"replicas": {"max": 3}}, "models": [{**MODEL, "replicas": {"min": 4}}]},
            "replicas.min must not be more than replicas.max",
        ),
        ({"coordinatorUrl": "http://{host}:{port}"}, "coordinatorUrl begins with http://"),
        ({"coordinatorTls": False, "coordinatorUrl": "https://{host}"}, "but coordinatorTls is false"),
    ],
)
def test_what_the_operator_would_refuse_at_its_start_is_refused_before(
    render: Render, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(helm.HelmError, match=words):
        render(values)


def test_what_goes_to_coordinators_is_encrypted_unless_that_is_switched_off(render: Render) -> None:
    assert settings_of(render({})).coordinators_encrypt
    assert not settings_of(render({"coordinatorTls": False})).coordinators_encrypt


def test_values_that_only_look_like_those_are_taken(render: Render) -> None:
    values = {
        "metrics": {"enabled": False, "port": 8081, "priorities": [-2_000_000, -5, 0, 1_000_000, 2_000_000]},
        "page": {"port": 8080},
        "leaderElection": {"leaseSeconds": 11},
        "pipelineDefaults": {"replicas": {"max": 4}},
        "models": [MODEL, {**MODEL, "name": "b", "replicas": {"min": 4}}],
    }
    assert settings_of(render(values)).metrics.priorities[-1] == 2_000_000


def workers_policy(objects: Objects, **spec: Any) -> dict[str, Any]:
    """That the operator makes with these settings, for a pipeline with ``spec``."""
    whole = {"model": {"name": "m", "uri": "s3://models/m"}, **spec}
    settings = settings_of(objects)
    made = network_policy(
        Owner("team-a", "toy", "uid"),
        LoRAPipelineSpec.model_validate(whole),
        settings.network_policy,
        settings.namespace,
    )
    return made["spec"]  # type: ignore[no-any-return]


def goes(egress: list[dict[str, Any]], address: str, port: int, protocol: str = "TCP") -> bool:
    """Whether a packet to an address outside of the cluster may leave."""
    where = ip_address(address)

    def is_there(peer: dict[str, Any]) -> bool:
        block = peer.get("ipBlock")
        return (
            block is not None
            and where in ip_network(block["cidr"])
            and not any(where in ip_network(one) for one in block.get("except", ()))
        )

    return any(
        ("to" not in rule or any(map(is_there, rule["to"])))
        and any(
            one["protocol"] == protocol and one["port"] <= port <= one.get("endPort", one["port"])
            for one in rule["ports"]
        )
        for rule in egress
        if "ports" in rule
    )


FAR = (
    "93.184.216.34",
    "10.96.0.10",
    "2606:2800:220::1",
    "fd12:3456::a",
)  # of either family, outside and inside


@pytest.mark.parametrize("port", [53, 5353])
def test_dns_is_reached_where_its_pods_listen_by_operator_and_workers(render: Render, port: int) -> None:
    """Of OpenShift: 5353. The network sees a packet behind the Service. Caches on the node have link-local addresses."""
    objects = render({})
    own = objects["NetworkPolicy", "rel-mlora-operator"]["spec"]["egress"]
    for egress, address, protocol in product(
        (own, workers_policy(objects)["egress"]), (*FAR, "169.254.20.10"), ("UDP", "TCP")
    ):
        assert goes(egress, address, port, protocol)
    plain = render({"networkPolicy": {"dnsPorts": [53]}})
    assert goes(workers_policy(plain)["egress"], FAR[0], port, "UDP") is (port == 53)


@pytest.mark.parametrize("port", [80, 443, 3900, 7480, 8333, 9000])
def test_by_default_workers_reach_stores_at_their_usual_ports_by_either_family(
    render: Render, port: int
) -> None:
    for address in FAR:
        assert goes(workers_policy(render({}))["egress"], address, port)


@pytest.mark.parametrize("port", [22, 6379, 8080, 29400, 29500])
def test_by_default_workers_reach_nothing_else(render: Render, port: int) -> None:
    for address, protocol in product(FAR, ("TCP", "UDP")):
        assert not goes(workers_policy(render({}))["egress"], address, port, protocol)


def test_workers_reach_no_metadata_service_of_any_cloud(render: Render) -> None:
    egress = workers_policy(render({}))["egress"]
    metadata = ("169.254.169.254", "64:ff9b::a9fe:a9fe", "fe80::1", *map(str, METADATA_SERVICES))
    for address, port in product(metadata, (80, 443)):
        assert not goes(egress, address, port), address


@pytest.mark.parametrize(
    ("story", "spec", "port"),
    [
        ("its store", {"storage": {"endpoint": "http://minio.storage:9999"}}, 9999),
        ("its store, by an address", {"storage": {"endpoint": "https://[fd00::1]:9443/"}}, 9443),
        ("its model", {"model": {"name": "m", "uri": "http://models.example:8088/m"}}, 8088),
        ("its mirror of the hub", {"worker": {"hubEndpoint": "http://mirror:7000"}}, 7000),
        ("its proxy", {"worker": {"env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]}}, 3128),
        (
            "a proxy without a scheme",
            {"worker": {"env": [{"name": "https_proxy", "value": "proxy:3129"}]}},
            3129,
        ),
        (
            "the service that gives roles",
            {"worker": {"env": [{"name": "AWS_ENDPOINT_URL_STS", "value": "https://sts.example:8444"}]}},
            8444,
        ),
    ],
)
def test_what_a_pipeline_itself_names_is_open_to_it(
    render: Render, story: str, spec: dict[str, Any], port: int
) -> None:
    objects = render({})
    for address in FAR:
        assert goes(workers_policy(objects, **spec)["egress"], address, port), story
        assert not goes(workers_policy(objects)["egress"], address, port), story


def test_networks_that_a_pipeline_allows_its_tasks_are_open_to_it(render: Render) -> None:
    egress = workers_policy(render({}), worker={"allowedNetworks": ["169.254.7.0/24"]})["egress"]
    assert goes(egress, "169.254.7.1", 443)
    assert not goes(egress, "169.254.7.1", 22)
    assert not goes(egress, "169.254.169.254", 443)


@pytest.mark.parametrize("value", ["", "http://", "http://a:b", "http://[::1", "proxy:99999"])
def test_an_address_that_is_none_opens_nothing_and_ends_nothing(render: Render, value: str) -> None:
    env = [{"name": "HTTPS_PROXY", "value": value}, {"name": "HTTP_PROXY"}]
    objects = render({})
    assert workers_policy(objects, worker={"env": env}) == workers_policy(objects)


def test_all_ports_may_be_taken_away_from_workers_and_no_rule_opens_everything(render: Render) -> None:
    objects = render({"networkPolicy": {"workerPorts": []}})
    egress = workers_policy(objects)["egress"]
    assert not goes(egress, FAR[0], 443)
    assert all(rule.get("to") or rule.get("ports") for rule in egress)
    rule = {"to": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": 8333}]}
    assert workers_policy(render({"networkPolicy": {"workerEgress": [rule]}}))["egress"][-1] == rule


@pytest.mark.parametrize("port", [443, 6443, 8443, 16443])
def test_the_operator_reaches_api_servers_where_distributions_have_them(render: Render, port: int) -> None:
    egress = render({})["NetworkPolicy", "rel-mlora-operator"]["spec"]["egress"]
    for address in FAR:
        assert goes(egress, address, port)


def test_without_rules_to_the_api_server_the_policy_is_still_one(render: Render) -> None:
    """Where another policy of the cluster lets everybody there."""
    objects = render({"networkPolicy": {"apiServerEgress": []}})
    assert len(objects["NetworkPolicy", "rel-mlora-operator"]["spec"]["egress"]) == 2


def test_the_notes_say_which_ports_are_open_and_who_may_scrape(render: Render) -> None:
    notes = render({"networkPolicy": {"workerPorts": [8444]}})["NOTES", ""]["text"]
    assert "at ports 8444 (networkPolicy.workerPorts)" in notes
    assert "no peer can scrape metrics until you set networkPolicy.metricsFrom" in notes
    assert "etwork policies" not in render({"networkPolicy": {"enabled": False}})["NOTES", ""]["text"]


def test_all_objects_but_the_crds_have_the_common_labels(render: Render) -> None:
    objects = render(
        {
            "commonLabels": {"team": "ml"},
            "page": {"enabled": True},
            "podDisruptionBudget": {"enabled": True},
        }
    )
    lacking = [
        key
        for key, one in objects.items()
        if key[0] != "NOTES" and "team" not in one["metadata"].get("labels", {})
    ]
    assert {kind for kind, _ in lacking} == {"CustomResourceDefinition"}


def test_a_cluster_may_choose_the_users_of_all_pods(render: Render) -> None:
    """OpenShift gives each namespace its own range of them, and refuses others."""
    objects = render({"runAsUser": None, "runAsGroup": None, "worker": {"runAsUser": None}})
    assert pod_of(objects)["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert settings_of(objects).worker.run_as_user is None
    ordinary = render({})
    assert pod_of(ordinary)["securityContext"]["runAsUser"] == 65532
    assert settings_of(ordinary).worker.run_as_user == 65532
    assert settings_of(render({"worker": {"runAsUser": 1000}})).worker.run_as_user == 1000


def test_users_of_a_namespace_may_do_by_their_role_what_they_may_with_pods(render: Render) -> None:
    objects = render({})
    by_role = {"view": {"get", "list", "watch"}, "edit": {"create", "update", "patch", "delete"}}
    for role, verbs in by_role.items():
        labels = objects["ClusterRole", f"rel-mlora-operator-{role}"]["metadata"]["labels"]
        assert labels[f"rbac.authorization.k8s.io/aggregate-to-{role}"] == "true"
        found = rules_of(objects, f"rel-mlora-operator-{role}")
        assert {verb for group, resource, verb in found if resource == "loratasks"} >= verbs
        assert {group for group, _, _ in found} == {"mlora.dev"}
    assert not any(
        resource == "lorapipelines" for _, resource, _ in rules_of(objects, "rel-mlora-operator-edit")
    )
    assert ("mlora.dev", "lorapipelines", "create") in rules_of(objects, "rel-mlora-operator-admin")
    statuses = {name for _, name in objects if name.startswith("rel-mlora-operator-")}
    assert {f"rel-mlora-operator-{role}" for role in ("view", "edit", "admin")} <= statuses
    without = render({"rbac": {"aggregate": False}})
    assert ("ClusterRole", "rel-mlora-operator-edit") not in without
