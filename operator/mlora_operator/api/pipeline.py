"""LoRAPipeline: one base model on D stages; the operator makes its StatefulSet."""

from __future__ import annotations

from ipaddress import ip_network
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from mlora_operator.api.bounded import bounded
from mlora_operator.api.meta import Condition, Model, NamespacesFrom, Status, Storage, Time
from mlora_operator.api.pod_parts import pod_part
from mlora_operator.api.rules import NETWORK
from mlora_worker import addresses
from mlora_worker.bounds import MOST_STAGES, Amount, LongName, Stage, Word, Words
from mlora_worker.protocol import (
    EndpointUrl,
    FolderUri,
    ModelFacts,
    ModelUri,
    ObjectName,
    StageReport,
    WireReport,
)


def _network(text: str) -> str:
    """The network that an address with a prefix lies in, as people write it: 10.0.0.1/8 is 10.0.0.0/8."""
    try:
        return str(ip_network(text, strict=False))
    except ValueError as error:
        raise ValueError(f"{text!r} is no network such as 10.0.0.0/8: {error}") from error


KIND = "LoRAPipeline"
PLURAL = "lorapipelines"


def _as_text(value: object) -> object:
    """A quantity without a unit may be written as a number, as everywhere in Kubernetes."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_INT_OR_STRING = Field(json_schema_extra={"x-kubernetes-int-or-string": True})
Quantity = Annotated[
    str,
    Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$"),
    BeforeValidator(_as_text),
    _INT_OR_STRING,
]
# Less than a byte is none; the m of 500m is a thousandth, and stands where M was meant.
Size = Annotated[
    str,
    Field(max_length=32, pattern=r"^([1-9][0-9]*(\.[0-9]+)?|0\.[0-9]+)(k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$"),
    BeforeValidator(_as_text),
    _INT_OR_STRING,
]
Duration = Annotated[str, Field(max_length=32, pattern=r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$")]
Weight = Annotated[float, Field(ge=0.001, le=1000)]
Network = Annotated[str, Field(max_length=64, pattern=NETWORK), AfterValidator(_network)]
LabelValue = Annotated[str, Field(max_length=63)]
LabelKey = Annotated[str, Field(max_length=317)]  # prefix/name
AnnotationValue = Annotated[str, Field(max_length=4096)]
NamespaceName = Annotated[str, Field(max_length=253)]
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
        default="priority",
        description="priority: the higher priority, then the older task; fairShare: namespaces in proportion to their "
        "weights; shortestRemaining: among equal priorities, the task with the fewest tokens left.",
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


MOST_PODS = 1024  # of a group that are remembered


class WorkersSeen(Status):
    """The worker pods as they were when restarts were last counted."""

    pods: Annotated[tuple[Word, ...], Field(max_length=MOST_PODS)] = Field(
        default=(), description="Uids of the pods."
    )
    first: Word = Field(default="", description="Uid of the coordinator's pod.")
    starts: Amount = Field(default=0, description="How often the coordinator was started again in that pod.")
    replaced: bool = Field(
        default=False, description="A pod was replaced since, so the next restart is no failure."
    )


class StartSeen(Status):
    """Workers that do not all get a place, remembered until they all have been ready."""

    since: Time = Field(default=None, description="Since when some have no place.")
    lack: Word | None = Field(default=None, description="What is missing: Quota, Room or Other.")
    words: Words = Field(default="", description="What the quota, the scheduler or the kubelet says.")
    attempts: Amount = Field(default=0, description="How often those that had a place were ended, too.")
    again: Time = Field(
        default=None, description="When all start again at the latest; absent while they try."
    )
    others: Amount = Field(
        default=0,
        description="Most workers of other pipelines meanwhile; fewer means that something was freed.",
    )


class LearnedLine(Status):
    """Bytes of a microbatch in one regard. Numbers are text, as elsewhere in a status."""

    coefficients: Annotated[tuple[Word, ...], Field(max_length=64)] = Field(
        default=(),
        description="Bytes: constant, per token, per squared token, per supervised position, per row of logits, and "
        "the smaller terms (docs/operators/memory.md).",
    )
    interval: Word = Field(
        default="0", description="By how much more it may be, as part of what is predicted."
    )


class LearnedMemory(Status):
    """What microbatches take of one stage's memory, as measured."""

    stage: Stage = Field(description="Number of the stage, from 0.")
    origin: Word = Field(
        default="",
        description="Of what it was learned: changes with the model, the stages and what computes.",
    )
    image: LongName | None = Field(default=None, description="Image of the workers that measured it.")
    samples: Amount = Field(default=0, description="Microbatches that it was learned from; 0: none yet.")
    widest: Amount = Field(default=0, description="Tokens of the widest of them.")
    correction: Word = Field(
        default="1", description="Factor on what is predicted, above 1 after memory ran out."
    )
    kept: LearnedLine = Field(
        default_factory=LearnedLine, description="Bytes kept between forward and backward."
    )
    forward: LearnedLine = Field(
        default_factory=LearnedLine, description="Most bytes there during a forward."
    )
    backward: LearnedLine = Field(
        default_factory=LearnedLine, description="Most bytes there during a backward."
    )


class PipelineStatus(Status):
    conditions: Annotated[tuple[Condition, ...], Field(max_length=64)] = Field(
        default=(), description="Ready, WorkersAvailable, Stalled, ServesOthers."
    )
    observed_generation: Amount | None = Field(
        default=None, description="The generation of the spec last acted upon."
    )
    state: Word | None = Field(default=None, description="Idle, Waiting, Starting, Ready, Stalled or Failed.")
    replicas: Amount | None = Field(default=None, description="Worker pods wanted now.")
    members: Amount | None = Field(
        default=None,
        description="Pipelines that share the tasks: this one and its replicas. Absent where spec.replicas has only one.",
    )
    ready_replicas: Amount | None = Field(default=None, description="Worker pods that answer.")
    restarts: Amount | None = Field(
        default=None, description="Failures of the workers in a row, each of which restarted all of them."
    )
    last_restart: Time = Field(default=None, description="When such a failure was last seen.")
    last_failure: Words | None = Field(
        default=None, description="What the workers said last when they failed."
    )
    given_up: Word | None = Field(
        default=None, description="Why the workers are not started again: a reason of Ready."
    )
    revision: Word | None = Field(
        default=None,
        description="Of the workers' configuration (spec and default image) that restarts and refusals are counted for.",
    )
    workers_seen: WorkersSeen | None = Field(
        default=None, description="The worker pods as they were when restarts were last counted."
    )
    start: StartSeen | None = Field(default=None, description="Why not all workers start, while that is so.")
    active_tasks: Amount | None = Field(default=None, description="Tasks that train now.")
    waiting_tasks: Amount | None = Field(default=None, description="Tasks that wait for this pipeline.")
    idle_since: Time = Field(default=None, description="Since when no task needs the pipeline.")
    updating_since: Time = Field(
        default=None,
        description="Since when tasks wait for workers that are to be replaced and finish what they train.",
    )
    plan_generation: Annotated[int, Field(strict=True, ge=0, le=MOST_PLANS)] | None = Field(
        default=None, description="Generation of the last plan sent to the coordinator."
    )
    facts: ModelFacts | None = Field(
        default=None, description="Shape of the base model, as the workers found it."
    )
    wire: WireReport | None = Field(
        default=None,
        description="Bytes and tokens that crossed between the stages of the present workers, as of when the "
        "pipeline last had no task in training.",
    )
    stages: Annotated[tuple[StageReport, ...], Field(max_length=MOST_STAGES)] = Field(
        default=(), description="The stages with their layers and memory."
    )
    memory: Annotated[tuple[LearnedMemory, ...], Field(max_length=MOST_STAGES)] = Field(
        default=(), description="What was learned of each stage's memory; a restart goes on from it."
    )
