"""Settings of the operator: one YAML or JSON file, named by ``MLORA_SETTINGS``; the chart mounts it.

All names are camelCase; unknown ones are refused and an error names the field. Example::

    namespace: mlora-system          # where pipelines of the catalogue are made; the operator's own namespace
    watchNamespaces: []              # empty: all namespaces; else these and ``namespace``
    worker:
      image: registry/worker:0.1.0   # of pipelines that name none; required
      imagePullPolicy: IfNotPresent
      imagePullSecrets: []
      metricsPort: null              # of each rank's /metrics; null: none
    models:                          # the catalogue: base models that tasks may name without a LoRAPipeline
      - name: HuggingFaceTB/SmolLM2-135M-Instruct
        uri: s3://models/smollm2-135m
        revision: null
        dtype: bfloat16
        # and any field of a LoRAPipeline's spec but model and allowedNamespaces:
        stages: 2
        replicas: {min: 1, max: 1, tasksPerReplica: 16}
        microbatchTokens: 4096
        idleTimeout: 10m
        startTimeout: 5m
        stallTimeout: 10m
        restarts: {limit: 5, resetAfter: 10m}
        memory: {budget: 20Gi, margin: 0.05}
        namespaceLimits: {training: 4, waiting: 100}   # by default none
        priorities: {default: {max: 0}}                # by default none
        storage: {endpoint: "http://s3.storage:8333", region: us-east-1, secretRef: {name: model-store}}
        checkpoints: {uri: s3://checkpoints}           # by default each task's own output
        worker: {resources: {limits: {nvidia.com/gpu: 1}}}
    serving: {namespaces: []}          # whose pipelines may serve other namespaces, beside those in ``namespace``; "*": all
    priorities: {default: {}, namespaces: {}}   # such as {team-a: {max: 1000}}: the highest priority of team-a's tasks
    outputs: {prefixes: {}}            # such as {team-a: [s3://adapters/team-a]}: below it, only team-a's tasks write
    log: {format: text, level: info}   # text | json; debug | info | warning | error
    health: {port: 8081, maxSilenceSeconds: 60}
    metrics: {enabled: false, port: 8080, tasks: false, mostTasks: 500, priorities: [0, 1, 10, 100, 1000]}
    page: {enabled: false, port: 8082, hosts: []}   # a read-only page of tasks and pipelines, for whoever reaches the port
    leaderElection: {leaseName: mlora-operator, leaseSeconds: 15, deadlineSeconds: 10}   # in ``namespace``
    networkPolicy:                   # of workers; the chart's default has it enabled
      {enabled: false, operatorLabels: {}, ports: [443], dnsPorts: [53], ingress: [], egress: []}
    allowFileUris: false             # file:// datasets and outputs: only where worker and user share a disk
    allowPrivateEndpoints: false     # addresses of tasks on loopback, link-local and metadata services: as above
    coordinatorTls: true             # coordinators and links have TLS, by a certificate of each pipeline; when left out,
                                     # false where coordinatorUrl begins with http://
    coordinatorUrl: "{scheme}://{host}:{port}"   # also {namespace}, {name}: operator outside the cluster

A Secret named in ``storage.secretRef`` of a model lies in ``namespace``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from mlora_operator.api.meta import Model, Storage
from mlora_operator.api.pipeline import (
    BaseModelSource,
    CheckpointSettings,
    LoRAPipelineSpec,
    Memory,
    NamespaceLimits,
    Opaque,
    Replicas,
    Restarts,
    Scheduling,
    Worker,
)
from mlora_operator.api.priorities import Priorities
from mlora_operator.api.problem import describe
from mlora_operator.api.quantities import Duration
from mlora_operator.api.rules import COORDINATOR_URL, PIPELINE_RULES, broken
from mlora_operator.rights import OutputSettings, Rights, ServingSettings, rights_of
from mlora_worker import addresses

# Of every rank: the coordinator's HTTP, the links, the rendezvous (manifests/worker.py).
WORKER_PORTS = frozenset({8080, 29400, 29500})


class SettingsError(Exception):
    """The settings file is missing or wrong; the message names file and field."""


class CatalogueModel(BaseModelSource):
    """A base model and the pipeline to make for it. Defaults are those of LoRAPipeline."""

    stages: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    replicas: Replicas = Field(default_factory=Replicas)
    memory: Memory = Field(default_factory=Memory)
    microbatch_tokens: Annotated[int, Field(strict=True, ge=16, le=1_048_576)] = 4096
    recompute_activations: Annotated[bool, Field(strict=True)] = False
    namespace_limits: NamespaceLimits = Field(default_factory=NamespaceLimits)
    scheduling: Scheduling = Field(default_factory=Scheduling)
    priorities: Priorities = Field(default_factory=Priorities)
    idle_timeout: Duration = "10m"
    start_timeout: Duration = "5m"
    stall_timeout: Duration = "10m"
    restarts: Restarts = Field(default_factory=Restarts)
    storage: Storage = Field(default_factory=Storage)
    checkpoints: CheckpointSettings = Field(default_factory=CheckpointSettings)
    worker: Worker = Field(default_factory=Worker)

    def pipeline_spec(self) -> LoRAPipelineSpec:
        """The spec of the pipeline that serves this model to all namespaces."""
        own = self.model_dump(by_alias=True, exclude_unset=True)
        model = {field: own.pop(field) for field in BaseModelSource.model_fields if field in own}
        return LoRAPipelineSpec.model_validate({"model": model, "allowedNamespaces": {"from": "All"}, **own})

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        """Field of the entry, and what the API server would say of it."""
        spec = self.pipeline_spec().model_dump(mode="json", by_alias=True, exclude_none=True)
        for path, message in broken(spec, PIPELINE_RULES):
            yield ".".join(path[1:] if path[0] == "model" else path), message


class WorkerDefaults(Model):
    image: str = Field(min_length=1)
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: tuple[Opaque, ...] = ()
    metrics_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    # User and group of the workers' processes; None: the cluster chooses.
    run_as_user: Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)] | None = 65532


class LogSettings(Model):
    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


class HealthSettings(Model):
    port: Annotated[int, Field(ge=1, le=65535)] = 8081
    max_silence_seconds: Annotated[float, Field(gt=0)] = 60


class MetricsSettings(Model):
    """``tasks``: series of each task in training, with its namespace and name; of at most ``mostTasks``.
    ``priorities``: the steps of the label ``priority``."""

    enabled: Annotated[bool, Field(strict=True)] = False
    port: Annotated[int, Field(ge=1, le=65535)] = 8080
    tasks: Annotated[bool, Field(strict=True)] = False
    most_tasks: Annotated[int, Field(strict=True, ge=0, le=10_000)] = 500
    priorities: Annotated[
        tuple[Annotated[int, Field(strict=True)], ...], Field(min_length=1, max_length=20)
    ] = (
        0,
        1,
        10,
        100,
        1000,
    )

    @model_validator(mode="after")
    def _steps_ascend(self) -> MetricsSettings:
        if list(self.priorities) != sorted(set(self.priorities)):
            raise ValueError("priorities must be strictly ascending")
        return self


class PageSettings(Model):
    """``hosts``: names under which it may be asked for, beside localhost and the loopback addresses."""

    enabled: Annotated[bool, Field(strict=True)] = False
    port: Annotated[int, Field(ge=1, le=65535)] = 8082
    hosts: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9.:\[\]_-]+$", max_length=253)], ...] = ()


class LeaderElection(Model):
    """Of all replicas that share a lease, one acts. It stops ``deadlineSeconds`` after its last renewal; another may begin
    ``leaseSeconds`` after it."""

    lease_name: str = Field(
        default="mlora-operator", pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253
    )
    lease_seconds: Annotated[int, Field(ge=4, le=3600)] = 15
    deadline_seconds: Annotated[int, Field(ge=3, le=3600)] = 10

    @model_validator(mode="after")
    def _stops_before_another_begins(self) -> LeaderElection:
        if self.deadline_seconds >= self.lease_seconds:
            raise ValueError("deadlineSeconds must be less than leaseSeconds")
        return self


Port = Annotated[int, Field(strict=True, ge=1, le=65535)]


class NetworkPolicySettings(Model):
    """``operatorLabels``: of the operator's pods. Of workers: ``ports`` of stores, hubs and web servers that they may go
    to, ``dnsPorts``, and ``ingress`` and ``egress``, further rules as in a NetworkPolicy."""

    enabled: Annotated[bool, Field(strict=True)] = False
    operator_labels: dict[str, str] = Field(default_factory=dict)
    ports: tuple[Port, ...] = (443,)
    dns_ports: tuple[Port, ...] = (53,)
    ingress: tuple[Opaque, ...] = ()
    egress: tuple[Opaque, ...] = ()

    @model_validator(mode="after")
    def _the_operator_is_known(self) -> NetworkPolicySettings:
        if self.enabled and not self.operator_labels:  # an empty selector would let every pod in
            raise ValueError("operatorLabels must contain labels that select the operator's pods")
        return self


class Settings(Model):
    namespace: str = Field(min_length=1)
    watch_namespaces: tuple[str, ...] = ()
    worker: WorkerDefaults
    models: tuple[CatalogueModel, ...] = ()
    serving: ServingSettings = Field(default_factory=ServingSettings)
    priorities: Priorities = Field(default_factory=Priorities)
    outputs: OutputSettings = Field(default_factory=OutputSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    health: HealthSettings = Field(default_factory=HealthSettings)
    page: PageSettings = Field(default_factory=PageSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    leader_election: LeaderElection = Field(default_factory=LeaderElection)
    network_policy: NetworkPolicySettings = Field(default_factory=NetworkPolicySettings)
    allow_file_uris: bool = False
    allow_private_endpoints: bool = False
    coordinator_tls: Annotated[bool, Field(strict=True)] | None = None
    coordinator_url: str = Field(default="{scheme}://{host}:{port}", pattern=COORDINATOR_URL)

    @model_validator(mode="after")
    def _each_model_once(self) -> Settings:
        names = [model.name for model in self.models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"models: names must be unique, but these occur twice: {', '.join(twice)}")
        return self

    @model_validator(mode="after")
    def _each_model_makes_a_pipeline(self) -> Settings:
        """Else the API server would refuse it when the first task asks for it, and only a log would say so."""
        problems = [
            f"models[{number}].{field}: {message}"
            for number, model in enumerate(self.models)
            for field, message in model.broken_rules()
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _each_port_once(self) -> Settings:
        ports = [
            self.health.port,
            *([self.metrics.port] if self.metrics.enabled else ()),
            *([self.page.port] if self.page.enabled else ()),
        ]
        if len(ports) != len(set(ports)):
            raise ValueError("health.port, metrics.port and page.port must differ")
        if self.worker.metrics_port in WORKER_PORTS:
            raise ValueError(
                f"worker.metricsPort {self.worker.metrics_port} is a port that workers use themselves: choose another"
            )
        return self

    @model_validator(mode="after")
    def _addresses_are_as_encrypted_as_what_is_there(self) -> Settings:
        """``{scheme}`` is how the workers of a pipeline serve now: those of a former version go on in plain HTTP. The
        chart of a former version gives an address that begins with http://, and says nothing of TLS."""
        if self.coordinator_tls and self.coordinator_url.startswith("http://"):
            raise ValueError(
                "coordinatorUrl begins with http://, but coordinators serve HTTPS: write {scheme}:// instead, or "
                "coordinatorTls: false, which sends credentials of tasks over the network in clear text"
            )
        if self.coordinator_tls is False and self.coordinator_url.startswith("https://"):
            raise ValueError("coordinatorUrl begins with https://, but coordinatorTls is false")
        return self

    @model_validator(mode="after")
    def _coordinators_have_addresses(self) -> Settings:
        """Whatever is filled in, which is names and numbers, changes nothing about where the host is."""
        filled = self.coordinator_url.format(
            scheme="https", host="name.namespace.svc", port=8080, namespace="namespace", name="name"
        )
        try:
            addresses.web(filled)
        except addresses.NotAnAddress as error:
            raise ValueError(f"coordinatorUrl: {error}") from None
        return self

    @property
    def coordinators_encrypt(self) -> bool:
        """Those of the workers that are started now."""
        if self.coordinator_tls is not None:
            return self.coordinator_tls
        return not self.coordinator_url.startswith("http://")

    @property
    def rights(self) -> Rights:
        return rights_of(self.namespace, self.serving, self.outputs, self.priorities)

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Namespaces to watch, the operator's own with them; empty means all."""
        return tuple(sorted({*self.watch_namespaces, self.namespace})) if self.watch_namespaces else ()


def parse_settings(text: str, origin: str) -> Settings:
    """Settings from YAML or JSON. Raises SettingsError that names ``origin`` and the field."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"{origin}: not YAML: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{origin}: expected a mapping with at least namespace and worker.image")
    try:
        return Settings.model_validate(content)
    except ValidationError as error:
        raise SettingsError(f"{origin}: {describe(error)}") from error


def load_settings(path: Path) -> Settings:
    """Settings from a file. Raises SettingsError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_settings(text, str(path))
