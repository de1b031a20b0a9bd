"""What the operator says of a LoRAPipeline. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mlora_operator.api.meta import Condition, Status, Time
from mlora_worker.bounds import MOST_STAGES, Amount, LongName, Stage, Word, Words
from mlora_worker.protocol import (
    ModelFacts,
    StageReport,
    WireReport,
)

MOST_PODS = 1024  # of a group that are remembered
MOST_PLANS = 2**61  # of a plan's generation that is remembered: behind it there is room to count on


class WorkersSeen(Status):
    """The worker pods at the time when restarts were last counted."""

    pods: Annotated[tuple[Word, ...], Field(max_length=MOST_PODS)] = Field(
        default=(), description="Uids of the pods."
    )
    first: Word = Field(default="", description="Uid of the coordinator's pod.")
    starts: Amount = Field(default=0, description="Container restarts of the coordinator in that pod.")
    replaced: bool = Field(
        default=False,
        description="A pod was replaced since, so the next restart does not count as a failure.",
    )


class StartSeen(Status):
    """Workers that do not all get a place, remembered until they all have been ready."""

    since: Time = Field(default=None, description="Time since which some workers cannot be scheduled.")
    lack: Word | None = Field(
        default=None, description="What is missing: Quota, Room (on the nodes) or Other."
    )
    words: Words = Field(default="", description="Message of the quota, the scheduler or the kubelet.")
    attempts: Amount = Field(
        default=0, description="How often the workers that were running were stopped as well."
    )
    again: Time = Field(
        default=None, description="Latest time of the next attempt; absent during an attempt."
    )
    others: Amount = Field(
        default=0,
        description="Maximum number of workers of other pipelines since then; fewer means that resources were freed.",
    )


class LearnedLine(Status):
    """Bytes of a microbatch in one regard. Numbers are text, as elsewhere in a status."""

    coefficients: Annotated[tuple[Word, ...], Field(max_length=64)] = Field(
        default=(),
        description="Bytes: constant, per token, per squared token, per supervised position, per row of logits, and "
        "the smaller terms (docs/operators/memory.md).",
    )
    interval: Word = Field(default="0", description="Upper margin, as a fraction of the prediction.")


class LearnedMemory(Status):
    """What microbatches take of one stage's memory, as measured."""

    stage: Stage = Field(description="Number of the stage, from 0.")
    origin: Word = Field(
        default="",
        description="Identity of what was measured; it changes with the model, the stages and the device.",
    )
    image: LongName | None = Field(default=None, description="Worker image that took the measurements.")
    samples: Amount = Field(default=0, description="Number of measured microbatches; 0: none yet.")
    widest: Amount = Field(default=0, description="Tokens of the largest of them.")
    correction: Word = Field(
        default="1", description="Factor on the prediction; above 1 after memory ran out."
    )
    kept: LearnedLine = Field(
        default_factory=LearnedLine, description="Bytes kept between the forward and the backward pass."
    )
    forward: LearnedLine = Field(default_factory=LearnedLine, description="Peak bytes during a forward pass.")
    backward: LearnedLine = Field(
        default_factory=LearnedLine, description="Peak bytes during a backward pass."
    )


class PipelineStatus(Status):
    conditions: Annotated[tuple[Condition, ...], Field(max_length=64)] = Field(
        default=(), description="Ready, WorkersAvailable, Stalled, ServesOthers."
    )
    observed_generation: Amount | None = Field(
        default=None, description="The generation of the spec that was last reconciled."
    )
    state: Word | None = Field(default=None, description="Idle, Waiting, Starting, Ready, Stalled or Failed.")
    replicas: Amount | None = Field(default=None, description="Desired number of worker pods.")
    members: Amount | None = Field(
        default=None,
        description="Number of pipelines that share the tasks: this one and its replicas. Absent when there is only one.",
    )
    ready_replicas: Amount | None = Field(default=None, description="Worker pods that are ready.")
    ready: Word | None = Field(default=None, description="readyReplicas/stages, for kubectl get.")
    update: Word | None = Field(
        default=None,
        description="Pending: the workers still have the former configuration, and are to be replaced.",
    )
    restarts: Amount | None = Field(
        default=None, description="Consecutive failures of the workers; each one restarted all of them."
    )
    last_restart: Time = Field(default=None, description="Time of the last such failure.")
    last_failure: Words | None = Field(
        default=None, description="Last message of the workers when they failed."
    )
    given_up: Word | None = Field(default=None, description="Why the workers stay down: a reason of Ready.")
    revision: Word | None = Field(
        default=None,
        description="Revision of the workers' configuration (spec and default image) for which restarts are counted.",
    )
    workers_seen: WorkersSeen | None = Field(
        default=None, description="The worker pods at the time when restarts were last counted."
    )
    start: StartSeen | None = Field(
        default=None, description="Why some workers cannot start; absent when all can."
    )
    active_tasks: Amount | None = Field(default=None, description="Tasks that are training.")
    waiting_tasks: Amount | None = Field(default=None, description="Tasks that wait for this pipeline.")
    idle_since: Time = Field(default=None, description="Time since which no task has needed the pipeline.")
    updating_since: Time = Field(
        default=None,
        description="Time since which tasks have waited for workers that are about to be replaced.",
    )
    plan_generation: Annotated[int, Field(strict=True, ge=0, le=MOST_PLANS)] | None = Field(
        default=None, description="Generation of the last plan sent to the coordinator."
    )
    facts: ModelFacts | None = Field(
        default=None, description="Shape of the base model, as the workers read it."
    )
    wire: WireReport | None = Field(
        default=None,
        description="Bytes and tokens sent between the stages of the current workers, as of the last time "
        "that no task was training.",
    )
    stages: Annotated[tuple[StageReport, ...], Field(max_length=MOST_STAGES)] = Field(
        default=(), description="The stages with their layers and memory."
    )
    memory: Annotated[tuple[LearnedMemory, ...], Field(max_length=MOST_STAGES)] = Field(
        default=(), description="The memory model of each stage, as measured; it survives restarts."
    )
