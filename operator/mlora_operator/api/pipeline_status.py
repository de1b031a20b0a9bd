"""What the operator says of a LoRAPipeline. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from mlora_operator.api.meta import Condition, Status, Time
from mlora_operator.api.pod_parts import pod_part
from mlora_worker.bounds import MOST_STAGES, Amount, LongName, Stage, Word, Words
from mlora_worker.protocol import (
    ModelFacts,
    StageReport,
    WireReport,
)

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
from mlora_operator.api.pipeline import MOST_PLANS

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
