"""The objects of a pipeline, compared whole."""

from __future__ import annotations

import json

import pytest

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.manifests.owner import Owner
from mlora_operator.manifests.secret import CertificatePair, tls_secret, token_secret
from mlora_operator.manifests.service import service
from mlora_operator.manifests.statefulset import lineage, revision, statefulset
from mlora_operator.settings import WorkerDefaults
from mlora_worker.protocol import WorkerConfig

OWNER = Owner("team-a", "smollm2", "uid-1")
DEFAULTS = WorkerDefaults(image="worker:1", image_pull_policy="IfNotPresent")
LABELS = {
    "app.kubernetes.io/name": "mlora-worker",
    "app.kubernetes.io/part-of": "mlora",
    "app.kubernetes.io/managed-by": "mlora-operator",
    "mlora.dev/pipeline": "smollm2",
}
SELECTOR = {"app.kubernetes.io/name": "mlora-worker", "mlora.dev/pipeline": "smollm2"}
OWNED = [
    {
        "apiVersion": "mlora.dev/v1alpha1",
        "kind": "LoRAPipeline",
        "name": "smollm2",
        "uid": "uid-1",
        "controller": True,
        "blockOwnerDeletion": False,
    }
]


def spec(**fields: object) -> LoRAPipelineSpec:
    return LoRAPipelineSpec.model_validate(
        {
            "model": {"name": "Org/SmolLM2", "uri": "s3://models/smollm2", "dtype": "float32"},
            "stages": 2,
            **fields,
        }
    )


def metadata(name: str, **annotations: str) -> dict[str, object]:
    return {
        "namespace": "team-a",
        "name": name,
        "labels": LABELS,
        "annotations": {"mlora.dev/pipeline-name": "smollm2", **annotations},
        "ownerReferences": OWNED,
    }


def test_service() -> None:
    assert service(OWNER) == {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata("mlora-smollm2"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": SELECTOR,
            "ports": [
                {"name": "http", "port": 8080, "targetPort": 8080, "protocol": "TCP"},
                {"name": "link", "port": 29400, "targetPort": 29400, "protocol": "TCP"},
                {"name": "rendezvous", "port": 29500, "targetPort": 29500, "protocol": "TCP"},
            ],
        },
    }


def test_token_secret() -> None:
    assert token_secret(OWNER, "hush") == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata("mlora-smollm2-token"),
        "type": "Opaque",
        "data": {"token": "aHVzaA=="},
    }


def test_statefulset() -> None:
    found = statefulset(OWNER, spec(), 2, DEFAULTS, "json")
    config = WorkerConfig.model_validate(
        {
            "pipeline": "team-a/smollm2",
            "model": {"name": "Org/SmolLM2", "uri": "s3://models/smollm2", "dtype": "float32"},
            "stages": 2,
            "coordinatorHost": "mlora-smollm2-0.mlora-smollm2.team-a.svc",
            "tokenFile": "/var/run/mlora/token/token",
            "cacheDir": "/cache",
            "terminationSeconds": 100,
            "logFormat": "json",
        }
    )
    hash_ = revision(OWNER, spec(), DEFAULTS, "json")
    alive = {"httpGet": {"path": "/healthz", "port": "http"}}
    assert found == {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata("mlora-smollm2", **{"mlora.dev/revision": hash_}),
        "spec": {
            "replicas": 2,
            "serviceName": "mlora-smollm2",
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": SELECTOR},
            "template": {
                "metadata": {
                    "labels": LABELS,
                    "annotations": {"mlora.dev/revision": hash_, "mlora.dev/lineage": lineage(spec())},
                },
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 120,
                    "securityContext": {
                        "runAsNonRoot": True,
                        "runAsUser": 65532,
                        "runAsGroup": 65532,
                        "fsGroup": 65532,
                        "fsGroupChangePolicy": "OnRootMismatch",
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [
                        {
                            "name": "worker",
                            "image": "worker:1",
                            "imagePullPolicy": "IfNotPresent",
                            "env": [
                                {"name": "MLORA_WORKER_CONFIG", "value": config.to_json()},
                                {
                                    "name": "MLORA_POD_NAME",
                                    "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
                                },
                                {"name": "HOME", "value": "/tmp"},
                            ],
                            "ports": [
                                {"name": "http", "containerPort": 8080, "protocol": "TCP"},
                                {"name": "link", "containerPort": 29400, "protocol": "TCP"},
                                {"name": "rendezvous", "containerPort": 29500, "protocol": "TCP"},
                            ],
                            "startupProbe": {
                                **alive,
                                "periodSeconds": 2,
                                "timeoutSeconds": 5,
                                "failureThreshold": 150,
                            },
                            "readinessProbe": {**alive, "periodSeconds": 5, "timeoutSeconds": 5},
                            "livenessProbe": {
                                **alive,
                                "periodSeconds": 10,
                                "timeoutSeconds": 10,
                                "failureThreshold": 6,
                            },
                            "terminationMessagePolicy": "FallbackToLogsOnError",
                            "securityContext": {
                                "allowPrivilegeEscalation": False,
                                "readOnlyRootFilesystem": True,
                                "capabilities": {"drop": ["ALL"]},
                            },
                            "volumeMounts": [
                                {
                                    "name": "mlora-token",
                                    "mountPath": "/var/run/mlora/token",
                                    "readOnly": True,
                                },
                                {"name": "mlora-tmp", "mountPath": "/tmp"},
                                {"name": "mlora-cache", "mountPath": "/cache"},
                                {"name": "mlora-shm", "mountPath": "/dev/shm"},
                            ],
                        }
                    ],
                    "volumes": [
                        {
                            "name": "mlora-token",
                            "secret": {"secretName": "mlora-smollm2-token", "defaultMode": 0o440},
                        },
                        {"name": "mlora-tmp", "emptyDir": {}},
                        {"name": "mlora-cache", "emptyDir": {}},
                        {"name": "mlora-shm", "emptyDir": {"medium": "Memory"}},
                    ],
                },
            },
        },
    }


def container(**fields: object) -> dict[str, object]:
    pod = statefulset(OWNER, spec(**fields), 2, DEFAULTS, "text")["spec"]["template"]["spec"]
    return {**pod["containers"][0], "pod": pod}


def test_the_models_keys_are_mounted_as_files_and_never_put_into_the_environment() -> None:
    found = container(storage={"endpoint": "http://s3:8333", "secretRef": {"name": "model-store"}})
    assert {
        "name": "mlora-storage",
        "secret": {"secretName": "model-store", "defaultMode": 0o440, "optional": True},
    } in found["pod"]["volumes"]  # type: ignore[index]
    config = json.loads(found["env"][0]["value"])  # type: ignore[index]
    assert config["storageKeysDir"] == "/var/run/mlora/storage"
    assert config["storageEndpoint"] == "http://s3:8333"


def test_the_users_pod_fields_are_passed_on() -> None:
    found = container(
        worker={
            "image": "mine:2",
            "imagePullPolicy": "Always",
            "imagePullSecrets": [{"name": "regcred"}],
            "resources": {"limits": {"nvidia.com/gpu": 1}},
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "priorityClassName": "batch",
            "runtimeClassName": "nvidia",
            "env": [{"name": "HOME", "value": "/home/me"}, {"name": "NCCL_DEBUG", "value": "INFO"}],
            "volumes": [{"name": "fast", "persistentVolumeClaim": {"claimName": "fast"}}],
            "volumeMounts": [{"name": "fast", "mountPath": "/cache"}],
        }
    )
    pod = found["pod"]
    assert isinstance(pod, dict)
    assert (found["image"], found["imagePullPolicy"]) == ("mine:2", "Always")
    assert found["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert pod["imagePullSecrets"] == [{"name": "regcred"}]
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"gpu": "h100"}, [{"operator": "Exists"}])
    assert (pod["affinity"], pod["priorityClassName"]) == ({"podAntiAffinity": {}}, "batch")
    assert pod["runtimeClassName"] == "nvidia"
    names = [one["name"] for one in found["env"]]  # type: ignore[attr-defined]
    assert names == ["MLORA_WORKER_CONFIG", "MLORA_POD_NAME", "HOME", "NCCL_DEBUG"]
    paths = [one["mountPath"] for one in found["volumeMounts"]]  # type: ignore[attr-defined]
    assert paths.count("/cache") == 1
    assert "mlora-cache" not in [one["name"] for one in pod["volumes"]]


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"idleTimeout": "1h"}, True),
        ({"memory": {"margin": 0.1}}, True),
        ({"memory": {"budget": "1Gi"}}, False),
        ({"allowedNamespaces": {"from": "All"}}, True),
        ({"stages": 3}, False),
        ({"worker": {"image": "worker:2"}}, False),
        ({"microbatchTokens": 128}, False),
        ({"recomputeActivations": True}, False),
    ],
)
def test_workers_are_replaced_only_for_what_they_are_told_at_their_start(
    fields: dict[str, object], same: bool
) -> None:
    before = revision(OWNER, spec(), DEFAULTS, "text")
    assert (revision(OWNER, spec(**fields), DEFAULTS, "text") == before) is same


def test_the_number_of_replicas_is_no_part_of_the_revision() -> None:
    templates = [statefulset(OWNER, spec(), count, DEFAULTS, "text")["spec"]["template"] for count in (0, 2)]
    assert templates[0] == templates[1]


@pytest.mark.parametrize("allowed", [False, True])
def test_workers_read_files_where_the_settings_allow_them(allowed: bool) -> None:
    template = statefulset(OWNER, spec(), 2, DEFAULTS, "text", allow_file_uris=allowed)["spec"]["template"]
    env = {one["name"]: one.get("value") for one in template["spec"]["containers"][0]["env"]}
    assert WorkerConfig.model_validate_json(env["MLORA_WORKER_CONFIG"]).allow_file_uris is allowed
    own = template["metadata"]["annotations"]["mlora.dev/revision"]
    assert revision(OWNER, spec(), DEFAULTS, "text", allow_file_uris=allowed) == own


def test_tls_secret() -> None:
    pair = CertificatePair("public", "hush")
    assert tls_secret(OWNER, pair) == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata("mlora-smollm2-tls"),
        "type": "kubernetes.io/tls",
        "data": {"tls.crt": "cHVibGlj", "tls.key": "aHVzaA=="},
    }
    assert "hush" not in repr(pair)


def test_workers_that_encrypt_have_the_certificate_as_files_and_say_so_to_kubelet_and_operator() -> None:
    template = statefulset(OWNER, spec(), 2, DEFAULTS, "text", tls=True)["spec"]["template"]
    (worker,) = template["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in worker["env"]}
    assert WorkerConfig.model_validate_json(env["MLORA_WORKER_CONFIG"]).tls_dir == "/var/run/mlora/tls"
    assert {
        "name": "mlora-tls",
        "secret": {"secretName": "mlora-smollm2-tls", "defaultMode": 0o440},
    } in template["spec"]["volumes"]
    assert {"name": "mlora-tls", "mountPath": "/var/run/mlora/tls", "readOnly": True} in worker[
        "volumeMounts"
    ]
    assert template["metadata"]["annotations"]["mlora.dev/scheme"] == "https"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert worker[probe]["httpGet"] == {"path": "/healthz", "port": "https", "scheme": "HTTPS"}
    assert worker["ports"][0] == {"name": "https", "containerPort": 8080, "protocol": "TCP"}
    assert service(OWNER, tls=True)["spec"]["ports"][0]["name"] == "https"


def test_to_switch_encryption_replaces_workers_and_another_certificate_does_not() -> None:
    """The template names the Secret, not what is in it."""
    plain, encrypted = (revision(OWNER, spec(), DEFAULTS, "text", tls=tls) for tls in (False, True))
    assert plain != encrypted
    template = json.dumps(statefulset(OWNER, spec(), 2, DEFAULTS, "text", tls=True)["spec"]["template"])
    assert "CERTIFICATE" not in template


def test_labels_annotations_and_an_account_of_ones_own_are_on_the_pods_and_take_nothing_away() -> None:
    given = {
        "podLabels": {"team": "ml", "mlora.dev/pipeline": "another"},
        "podAnnotations": {"sidecar.istio.io/inject": "false", "mlora.dev/revision": "x"},
        "serviceAccountName": "trainer",
    }
    plain = statefulset(OWNER, spec(), 2, DEFAULTS, "json")["spec"]["template"]
    pod = statefulset(OWNER, spec(worker=given), 2, DEFAULTS, "json")["spec"]["template"]
    assert pod["metadata"]["labels"] == plain["metadata"]["labels"] | {"team": "ml"}
    assert pod["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
    assert (
        pod["metadata"]["annotations"].keys() - {"sidecar.istio.io/inject"}
        == plain["metadata"]["annotations"].keys()
    )
    assert "x" not in pod["metadata"]["annotations"].values()
    assert pod["spec"]["serviceAccountName"] == "trainer"
    assert pod["spec"]["automountServiceAccountToken"] is False, (
        "an identity of a cloud needs none of the cluster"
    )
    assert revision(OWNER, spec(), DEFAULTS, "json") != revision(OWNER, spec(worker=given), DEFAULTS, "json")
    one, other = ({"podLabels": {"team": name}} for name in ("a", "b"))
    assert revision(OWNER, spec(worker=one), DEFAULTS, "json") != revision(
        OWNER, spec(worker=other), DEFAULTS, "json"
    )


def test_a_cluster_that_chooses_users_is_named_none() -> None:
    free = DEFAULTS.model_copy(update={"run_as_user": None})
    pod = statefulset(OWNER, spec(), 2, free, "json")["spec"]["template"]["spec"]
    assert not {"runAsUser", "runAsGroup", "fsGroup"} & pod["securityContext"].keys()
    assert pod["securityContext"]["runAsNonRoot"] is True
