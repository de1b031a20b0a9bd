"""The StatefulSet of a pipeline's workers. Pure."""

from __future__ import annotations

from typing import Any, Literal

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.manifests.names import LINEAGE, REVISION, SCHEME, digest, labels, selector
from mlora_operator.manifests.owner import Owner, metadata
from mlora_operator.manifests.worker import (
    CACHE_DIR,
    GRACE_SECONDS,
    HTTP_PORT,
    LINK_PORT,
    RENDEZVOUS_PORT,
    STORAGE_KEYS_DIR,
    TLS_DIR,
    TOKEN_DIR,
    worker_config,
)
from mlora_operator.settings import WorkerDefaults
from mlora_worker.protocol import WorkerConfig


def statefulset(
    owner: Owner,
    spec: LoRAPipelineSpec,
    replicas: int,
    defaults: WorkerDefaults,
    log_format: Literal["text", "json"],
    *,
    allow_file_uris: bool = False,
    tls: bool = False,
) -> dict[str, Any]:
    """All ranks start at once (Parallel) and wait for each other. The operator, not the controller, replaces
    pods of a former template (OnDelete): it knows when they train."""
    template = pod_template(owner, spec, defaults, log_format, allow_file_uris=allow_file_uris, tls=tls)
    meta = metadata(owner, owner.child)
    meta["annotations"] |= {REVISION: template["metadata"]["annotations"][REVISION]}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": meta,
        "spec": {
            "replicas": replicas,
            "serviceName": owner.child,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": selector(owner.name)},
            "template": template,
        },
    }


def revision(
    owner: Owner,
    spec: LoRAPipelineSpec,
    defaults: WorkerDefaults,
    log_format: Literal["text", "json"],
    *,
    allow_file_uris: bool = False,
    tls: bool = False,
) -> str:
    """Identity of the pod template: pods that carry another one were started with another configuration."""
    template = pod_template(owner, spec, defaults, log_format, allow_file_uris=allow_file_uris, tls=tls)
    return str(template["metadata"]["annotations"][REVISION])


def lineage(spec: LoRAPipelineSpec) -> str:
    """Workers of the same one take up each other's tasks: it is the same base model, and checkpoints lie where they lay."""
    model = spec.model
    what = [model.name, model.uri, model.revision, model.dtype, spec.checkpoints.uri]
    return digest(what if model.quantization.type == "none" else [*what, model.quantization.label])


def pod_template(
    owner: Owner,
    spec: LoRAPipelineSpec,
    defaults: WorkerDefaults,
    log_format: Literal["text", "json"],
    *,
    allow_file_uris: bool = False,
    tls: bool = False,
) -> dict[str, Any]:
    pod = _pod_spec(owner, spec, defaults, log_format, allow_file_uris=allow_file_uris, tls=tls)
    worker = spec.worker
    more = {"labels": worker.pod_labels, "annotations": worker.pod_annotations}
    named = any(more.values())
    return {
        "metadata": {
            "labels": {**worker.pod_labels, **labels(owner.name)},
            "annotations": {
                **worker.pod_annotations,
                REVISION: digest([pod, more] if named else pod),
                LINEAGE: lineage(spec),
                **({SCHEME: "https"} if tls else {}),
            },
        },
        "spec": pod,
    }


def _pod_spec(
    owner: Owner,
    spec: LoRAPipelineSpec,
    defaults: WorkerDefaults,
    log_format: Literal["text", "json"],
    *,
    allow_file_uris: bool = False,
    tls: bool = False,
) -> dict[str, Any]:
    worker = spec.worker
    volumes, mounts = _volumes(owner, spec, tls)
    config = worker_config(
        owner, spec, log_format, allow_file_uris=allow_file_uris, tls=tls, metrics_port=defaults.metrics_port
    )
    pull_secrets = worker.image_pull_secrets or defaults.image_pull_secrets
    # A cluster that gives each namespace its own users, such as OpenShift, chooses them where none is named.
    user = defaults.run_as_user
    users = {} if user is None else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        # What the restricted Pod Security Standard asks for; fsGroup lets the user read mounted Secrets.
        "securityContext": {
            "runAsNonRoot": True,
            **users,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(spec, defaults, config, mounts)],
        "volumes": volumes,
    }
    optional: dict[str, Any] = {
        "imagePullSecrets": list(pull_secrets),
        "nodeSelector": worker.node_selector,
        "tolerations": list(worker.tolerations),
        "affinity": worker.affinity,
        "serviceAccountName": worker.service_account_name,
        "priorityClassName": worker.priority_class_name,
        "runtimeClassName": worker.runtime_class_name,
    }
    return pod | {field: value for field, value in optional.items() if value}


def _container(
    spec: LoRAPipelineSpec,
    defaults: WorkerDefaults,
    config: WorkerConfig,
    mounts: list[dict[str, Any]],
) -> dict[str, Any]:
    worker = spec.worker
    scheme = "http" if config.tls_dir is None else "https"
    ports = [(scheme, HTTP_PORT), ("link", LINK_PORT), ("rendezvous", RENDEZVOUS_PORT)]
    if config.metrics_port is not None:
        ports.append(("metrics", config.metrics_port))
    alive: dict[str, Any] = {"httpGet": {"path": "/healthz", "port": scheme}}
    if scheme == "https":
        alive["httpGet"]["scheme"] = "HTTPS"  # whose certificate it is, the kubelet does not ask
    container: dict[str, Any] = {
        "name": "worker",
        "image": worker.image or defaults.image,
        "imagePullPolicy": worker.image_pull_policy or defaults.image_pull_policy,
        "env": [
            *_own_env(config.to_json(), {one["name"] for one in worker.env}),
            *worker.env,
        ],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports],
        # A rank serves /healthz as soon as its process is up; loading a large model may take long after that.
        "startupProbe": {**alive, "periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 150},
        "readinessProbe": {**alive, "periodSeconds": 5, "timeoutSeconds": 5},
        "livenessProbe": {**alive, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
        # Why a worker ended is shown in the pipeline's condition: its last lines are the message.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    return container | ({"resources": worker.resources} if worker.resources else {})


def _own_env(config: str, users: set[str]) -> list[dict[str, Any]]:
    """``HOME`` is where libraries put their caches; the root file system is read-only."""
    own: list[dict[str, Any]] = [
        {"name": "MLORA_WORKER_CONFIG", "value": config},
        {"name": "MLORA_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "HOME", "value": "/tmp"},
    ]
    return [one for one in own if one["name"] not in users]


def _volumes(
    owner: Owner, spec: LoRAPipelineSpec, tls: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and mounts. A path that the user mounts is theirs, such as a persistent volume at the cache."""
    own: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (
            {"name": "mlora-token", "secret": {"secretName": owner.token_secret, "defaultMode": 0o440}},
            {"name": "mlora-token", "mountPath": TOKEN_DIR, "readOnly": True},
        ),
        ({"name": "mlora-tmp", "emptyDir": {}}, {"name": "mlora-tmp", "mountPath": "/tmp"}),
        ({"name": "mlora-cache", "emptyDir": {}}, {"name": "mlora-cache", "mountPath": CACHE_DIR}),
        # Libraries of several processes on one device exchange tensors here; the runtime's default is 64 MiB.
        (
            {"name": "mlora-shm", "emptyDir": {"medium": "Memory"}},
            {"name": "mlora-shm", "mountPath": "/dev/shm"},
        ),
    ]
    if tls:
        secret = {"secretName": owner.tls_secret, "defaultMode": 0o440}
        own.append(
            (
                {"name": "mlora-tls", "secret": secret},
                {"name": "mlora-tls", "mountPath": TLS_DIR, "readOnly": True},
            )
        )
    if spec.storage.secret_ref is not None:
        source = {"secretName": spec.storage.secret_ref.name, "defaultMode": 0o440, "optional": True}
        own.append(
            (
                {"name": "mlora-storage", "secret": source},
                {"name": "mlora-storage", "mountPath": STORAGE_KEYS_DIR, "readOnly": True},
            )
        )
    taken = {mount.get("mountPath") for mount in spec.worker.volume_mounts}
    used = [(volume, mount) for volume, mount in own if mount["mountPath"] not in taken]
    volumes = [*(volume for volume, _ in used), *spec.worker.volumes]
    mounts = [*(mount for _, mount in used), *spec.worker.volume_mounts]
    return volumes, mounts
