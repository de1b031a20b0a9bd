"""LoRAPipeline: one base model on D stages; the operator makes its StatefulSet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from mlora_operator.api.bounded import bounded
from mlora_operator.api.meta import Model, NamespacesFrom, Storage
from mlora_operator.api.pod_parts import pod_part
from mlora_operator.api.priorities import Priorities
from mlora_operator.api.quantities import (
    AnnotationValue,
    Duration,
    LabelKey,
    LabelValue,
    NamespaceName,
    Network,
    Quantity,
    Size,
    Weight,
)
from mlora_worker import addresses
from mlora_worker.protocol import (
    EndpointUrl,
    FolderUri,
    ModelUri,
    ObjectName,
    Quantization,
)

KIND = "LoRAPipeline"
PLURAL = "lorapipelines"

# Parts of the pod API that are passed on as they are.
if TYPE_CHECKING:
    Resources = dict[str, Any]
    Toleration = dict[str, Any]
    Affinity = dict[str, Any]
    EnvVar = dict[str, Any]
    Volume = dict[str, Any]
    VolumeMount = dict[str, Any]
    LocalObjectReference = dict[str, Any]
else:
    Resources = pod_part("resources")
    Toleration = pod_part("toleration")
    Affinity = pod_part("affinity")
    EnvVar = pod_part("envVar")
    Volume = pod_part("volume")
    VolumeMount = pod_part("volumeMount")
    LocalObjectReference = pod_part("localObjectReference")


# A part of another API that only the operator's settings have.
Opaque = Annotated[dict[str, Any], AfterValidator(bounded)]


class BaseModelSource(Model):
    name: str = Field(min_length=1, max_length=253, description="The name that tasks give as baseModel.")
    uri: ModelUri = Field(
        description="Folder with config.json, tokenizer and *.safetensors: s3://bucket/prefix, hf://OWNER/NAME on a hub, "
        "https://host/folder on a web server, or file:///path in a mounted volume.",
    )
    revision: Annotated[str, Field(max_length=128, pattern=addresses.REVISION)] | None = Field(
        default=None,
        description="Branch, tag or commit of a model on a hub, by default main; it is written into adapter_config.json.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16",
        description="Data type in which the frozen weights are stored and computed. Adapters are float32.",
    )
    quantization: Quantization = Field(
        default_factory=Quantization,
        description="Keep the frozen matrices in fewer bits. They become matrices of dtype for each product.",
    )


class AllowedNamespaces(Model):
    """Namespaces whose tasks this pipeline serves."""

    from_: NamespacesFrom = Field(
        default=NamespacesFrom.SAME,
        alias="from",
        description="Same: the pipeline's own namespace; All; Selector: namespaces with the labels of selector.",
    )
    selector: dict[LabelKey, LabelValue] | None = Field(
        default=None, max_length=64, description="Labels that a namespace must have (with from: Selector)."
    )


class Memory(Model):
    budget: Size | None = Field(
        default=None, description="Bytes per stage, such as 20Gi. Default: the memory of the device."
    )
    margin: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=0.05, description="Fraction of the budget that stays free."
    )


class Scheduling(Model):
    """The order in which tasks are scheduled."""

    policy: Literal["priority", "fairShare", "shortestRemaining"] = Field(
        default="fairShare",
        description="fairShare: namespaces get memory in proportion to their weights; within a namespace, the task of "
        "higher priority, then the older one, is first. priority: the same order for all namespaces together. "
        "shortestRemaining: among equal priorities, the task with the fewest remaining tokens is first.",
    )
    hold_back: Duration = Field(
        default="10m",
        description="After a task has waited this long, no task of lower or equal rank is admitted before it.",
    )
    weights: dict[NamespaceName, Weight] = Field(
        default_factory=dict,
        max_length=1000,
        description="fairShare: weight of each namespace. Default: 1.",
    )
    half_life: Duration = Field(
        default="24h",
        description="fairShare: half-life of past usage; with 0s only running tasks count.",
    )
    quantum: Duration = Field(
        default="10m",
        description="fairShare: a task preempts one of another namespace once that namespace has used more "
        "than its share by what the pipeline trains in this time.",
    )


class NamespaceLimits(Model):
    """Limits of tasks per namespace."""

    training: Annotated[int, Field(strict=True, ge=1, le=100_000)] | None = Field(
        default=None, description="Maximum number of admitted tasks per namespace. Absent: no limit."
    )
    waiting: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] | None = Field(
        default=None,
        description="Maximum number of waiting or suspended tasks per namespace; further tasks are not "
        "accepted until there are fewer. Absent: no limit.",
    )


class Replicas(Model):
    """Pipelines of the same kind that share the tasks of one. Each has workers of its own."""

    min: Annotated[int, Field(strict=True, ge=1, le=64)] = Field(
        default=1, description="Minimum number of replicas, including this pipeline."
    )
    max: Annotated[int, Field(strict=True, ge=1, le=64)] = Field(
        default=1, description="Maximum number of replicas, including this pipeline."
    )
    tasks_per_replica: Annotated[int, Field(strict=True, ge=1, le=100_000)] = Field(
        default=16,
        description="Number of unfinished tasks per replica; when there are more, another replica is created.",
    )


class Restarts(Model):
    """How often failed workers are restarted."""

    limit: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] = Field(
        default=5,
        description="Number of consecutive failures after which the pipeline is Failed and its workers stay down.",
    )
    reset_after: Duration = Field(
        default="10m", description="After this long with progress, the restart count is reset to zero."
    )


class CheckpointSettings(Model):
    """Where tasks in training keep what they need to go on after a failure."""

    uri: FolderUri | None = Field(
        default=None,
        description="Folder for the checkpoints of all tasks, s3://bucket/prefix with the keys of storage, or file:///path "
        "in a mounted volume; by default each task's own output, with the task's credentials.",
    )


class Worker(Model):
    """The worker pods: a pod template's usual fields."""

    image: str | None = Field(default=None, max_length=512, description="Worker image. Default: the chart's.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="As in a container."
    )
    image_pull_secrets: tuple[LocalObjectReference, ...] = Field(
        default=(), max_length=64, description="As in a pod."
    )
    resources: Resources = Field(
        default_factory=dict, description="As in a container; one GPU per pod is usual."
    )
    node_selector: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, max_length=64, description="As in a pod."
    )
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=256, description="As in a pod.")
    affinity: Affinity = Field(default_factory=dict, description="As in a pod.")
    env: tuple[EnvVar, ...] = Field(default=(), max_length=1024, description="As in a container.")
    volumes: tuple[Volume, ...] = Field(default=(), max_length=256, description="As in a pod.")
    volume_mounts: tuple[VolumeMount, ...] = Field(
        default=(), max_length=256, description="As in a container."
    )
    pod_labels: dict[LabelKey, LabelValue] = Field(
        default_factory=dict,
        max_length=64,
        description="Additional pod labels, such as those that cluster policies require. They cannot replace "
        "the operator's own.",
    )
    pod_annotations: dict[LabelKey, AnnotationValue] = Field(
        default_factory=dict,
        max_length=64,
        description="Additional pod annotations. They cannot replace the operator's own.",
    )
    service_account_name: ObjectName | None = Field(
        default=None,
        description="ServiceAccount of the pods, for a cloud identity or for cluster policies; its token is not mounted.",
    )
    priority_class_name: ObjectName | None = Field(default=None, description="As in a pod.")
    runtime_class_name: ObjectName | None = Field(default=None, description="As in a pod.")
    allowed_networks: tuple[Network, ...] = Field(
        default=(),
        max_length=64,
        description="Networks such as 127.0.0.0/8 that the addresses of tasks may reach although they are "
        "loopback, link-local or metadata services, which are rejected otherwise.",
    )
    hub_endpoint: EndpointUrl | None = Field(
        default=None,
        description="URL of the hub that serves hf:// addresses of the model and of tasks' rows, such as a "
        "mirror. Default: the public hub.",
    )
    model_cache: Quantity = Field(
        default="100Gi",
        description="Size limit of the cache below /cache for weights from hubs and web servers. Pipelines "
        "that mount the same volume share it. 0 disables the cache.",
    )
    threads: Annotated[int, Field(strict=True, ge=0, le=1024)] = Field(
        default=0, description="CPU threads per rank; 0: all that torch detects."
    )


class LoRAPipelineSpec(Model):
    """What the platform team wants."""

    model: BaseModelSource = Field(description="The frozen base model.")
    stages: Annotated[int, Field(strict=True, ge=1, le=64)] = Field(
        default=1, description="Number of pipeline stages; each has one worker pod."
    )
    replicas: Replicas = Field(
        default_factory=Replicas,
        description="Scales this pipeline out while the queue is long; each replica has its own workers.",
    )
    allowed_namespaces: AllowedNamespaces = Field(
        default_factory=AllowedNamespaces, description="Namespaces whose tasks this pipeline serves."
    )
    namespace_limits: NamespaceLimits = Field(
        default_factory=NamespaceLimits, description="Limits of tasks per namespace."
    )
    priorities: Priorities = Field(
        default_factory=Priorities,
        description="Limits of spec.priority of tasks. They can only narrow the limits in the operator's chart.",
    )
    memory: Memory = Field(
        default_factory=Memory, description="Memory per stage that admission may allocate."
    )
    microbatch_tokens: Annotated[int, Field(strict=True, ge=16, le=1_048_576)] = Field(
        default=4096, description="Maximum number of tokens in one microbatch."
    )
    recompute_activations: bool = Field(
        default=False,
        strict=True,
        description="Activation checkpointing: keep only the input of each layer and recompute its forward "
        "pass in the backward pass. This needs less memory and more time; the results are the same.",
    )
    scheduling: Scheduling = Field(
        default_factory=Scheduling, description="The order in which tasks are scheduled."
    )
    idle_timeout: Duration = Field(
        default="10m", description="Time without a task after which the workers are scaled to zero."
    )
    start_timeout: Duration = Field(
        default="5m",
        description="When a quota, full nodes or an image keep some workers from starting for this long, all "
        "workers are stopped and restarted later. 0s: never.",
    )
    stall_timeout: Duration = Field(
        default="10m",
        description="When tasks are training but no microbatch completes for this long, or the coordinator "
        "of ready workers does not respond, the workers are restarted. 0s: never.",
    )
    restarts: Restarts = Field(
        default_factory=Restarts, description="How often failed workers are restarted."
    )
    storage: Storage = Field(default_factory=Storage, description="The store of the model.")
    checkpoints: CheckpointSettings = Field(
        default_factory=CheckpointSettings, description="Location of the tasks' checkpoints."
    )
    worker: Worker = Field(default_factory=Worker, description="The worker pods.")
