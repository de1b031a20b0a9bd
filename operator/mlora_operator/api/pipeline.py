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
MOST_PLANS = 2**61  # of a plan's generation that is remembered: behind it there is room to count on


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
        description="In which the frozen weights are held and computed; adapters are float32.",
    )


class AllowedNamespaces(Model):
    """Whose tasks this pipeline takes."""

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
        default=None, description="Bytes per stage, such as 20Gi; by default what the device has."
    )
    margin: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=0.05, description="Part of the budget that is kept free."
    )


class Scheduling(Model):
    """Whose turn it is."""

    policy: Literal["priority", "fairShare", "shortestRemaining"] = Field(
        default="fairShare",
        description="fairShare: namespaces in proportion to their weights, and within one the higher priority, then the "
        "older task; priority: that for all namespaces together; shortestRemaining: among equal priorities, the task with "
        "the fewest tokens left.",
    )
    hold_back: Duration = Field(
        default="10m",
        description="After a task has waited so long for a place, no task of lower or equal rank gets one before it.",
    )
    weights: dict[NamespaceName, Weight] = Field(
        default_factory=dict,
        max_length=1000,
        description="fairShare: weights by namespace; 1 for one that is not named.",
    )
    half_life: Duration = Field(
        default="24h",
        description="fairShare: after this time what a namespace was served counts half; 0s: only what runs counts.",
    )
    quantum: Duration = Field(
        default="10m",
        description="fairShare: a task takes another namespace's place once that namespace is ahead by more than the "
        "pipeline trains in this time.",
    )


class NamespaceLimits(Model):
    """How many tasks each namespace may have here at once."""

    training: Annotated[int, Field(strict=True, ge=1, le=100_000)] | None = Field(
        default=None, description="Most tasks of a namespace that have a place at once; absent: no limit."
    )
    waiting: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] | None = Field(
        default=None,
        description="Most tasks of a namespace that wait or are suspended here; more are kept out until there are fewer. "
        "Absent: no limit.",
    )


class Replicas(Model):
    """Pipelines of the same kind that share the tasks of one. Each has workers of its own."""

    min: Annotated[int, Field(strict=True, ge=1, le=64)] = Field(
        default=1, description="Replicas that there are at least, this pipeline included."
    )
    max: Annotated[int, Field(strict=True, ge=1, le=64)] = Field(
        default=1, description="Replicas that there are at most, this pipeline included."
    )
    tasks_per_replica: Annotated[int, Field(strict=True, ge=1, le=100_000)] = Field(
        default=16,
        description="There is another replica whenever there are more unfinished tasks than so many for each.",
    )


class Restarts(Model):
    """How often workers that fail are started again."""

    limit: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] = Field(
        default=5,
        description="Failures in a row after which the pipeline is Failed and its workers are not started again.",
    )
    reset_after: Duration = Field(
        default="10m", description="Progress so long after a restart sets the count back to zero."
    )


class Checkpoints(Model):
    """Where tasks in training keep what they need to go on after a failure."""

    uri: FolderUri | None = Field(
        default=None,
        description="Folder for the checkpoints of all tasks, s3://bucket/prefix with the keys of storage, or file:///path "
        "in a mounted volume; by default each task's own output, with the task's keys.",
    )


class Worker(Model):
    """The worker pods: a pod template's usual fields."""

    image: str | None = Field(
        default=None, max_length=512, description="Worker image; the chart's by default."
    )
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
        description="More labels of the pods, such as those that a cluster's policies ask for; the operator's own stay.",
    )
    pod_annotations: dict[LabelKey, AnnotationValue] = Field(
        default_factory=dict,
        max_length=64,
        description="More annotations of the pods; the operator's own stay.",
    )
    service_account_name: ObjectName | None = Field(
        default=None,
        description="ServiceAccount of the pods, for an identity of a cloud or rights that a cluster's policies ask for; "
        "no token of the cluster is mounted.",
    )
    priority_class_name: ObjectName | None = Field(default=None, description="As in a pod.")
    runtime_class_name: ObjectName | None = Field(default=None, description="As in a pod.")
    allowed_networks: tuple[Network, ...] = Field(
        default=(),
        max_length=64,
        description="Networks such as 127.0.0.0/8 that tasks may name in addresses though they are loopback, link-local "
        "or metadata services, which are refused else.",
    )
    hub_endpoint: EndpointUrl | None = Field(
        default=None,
        description="URL of the hub that hf:// addresses of the model and of tasks' rows are read from, such as a mirror; "
        "by default the public one.",
    )
    model_cache: Quantity = Field(
        default="100Gi",
        description="Most bytes of the weights of a model on a hub or web server that are kept below /cache, together with "
        "those of other pipelines that mount the same volume; 0: none.",
    )
    threads: Annotated[int, Field(strict=True, ge=0, le=1024)] = Field(
        default=0, description="CPU threads per rank; 0: all that torch sees."
    )


class LoRAPipelineSpec(Model):
    """What the platform team wants."""

    model: BaseModelSource = Field(description="The frozen base model.")
    stages: Annotated[int, Field(strict=True, ge=1, le=64)] = Field(
        default=1, description="Stages of the pipeline, one worker pod each."
    )
    replicas: Replicas = Field(
        default_factory=Replicas,
        description="More pipelines like this one while many tasks are there, each with stages workers of its own.",
    )
    allowed_namespaces: AllowedNamespaces = Field(
        default_factory=AllowedNamespaces, description="Whose tasks this pipeline takes."
    )
    namespace_limits: NamespaceLimits = Field(
        default_factory=NamespaceLimits, description="How many tasks each namespace may have here at once."
    )
    priorities: Priorities = Field(
        default_factory=Priorities,
        description="How high spec.priority of tasks may be here. What the platform team gives in the operator's chart is "
        "only narrowed.",
    )
    memory: Memory = Field(default_factory=Memory, description="Memory per stage that admission may use.")
    microbatch_tokens: Annotated[int, Field(strict=True, ge=16, le=1_048_576)] = Field(
        default=4096, description="Most tokens that travel the pipeline as one microbatch."
    )
    recompute_activations: bool = Field(
        default=False,
        strict=True,
        description="Keep of each layer only its input for the backward, which then computes the layer's forward once "
        "more: less memory, more time, the same results.",
    )
    scheduling: Scheduling = Field(default_factory=Scheduling, description="Whose turn it is.")
    idle_timeout: Duration = Field(
        default="10m", description="After this long without a task the workers are scaled to zero."
    )
    start_timeout: Duration = Field(
        default="5m",
        description="When a quota, full nodes or an image keep some workers from starting for so long, the others are "
        "ended, too, and all start again later; 0s: never.",
    )
    stall_timeout: Duration = Field(
        default="10m",
        description="When tasks train and no microbatch was trained for so long, or the coordinator of ready workers "
        "does not answer, the workers are started anew; 0s: never.",
    )
    restarts: Restarts = Field(
        default_factory=Restarts, description="How often workers that fail are started again."
    )
    storage: Storage = Field(default_factory=Storage, description="The store of the model.")
    checkpoints: Checkpoints = Field(
        default_factory=Checkpoints, description="Where checkpoints of tasks are kept."
    )
    worker: Worker = Field(default_factory=Worker, description="The worker pods.")
