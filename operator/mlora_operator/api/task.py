"""LoRATask: one adapter to train."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from mlora_operator.api.meta import Condition, Model, Status, Storage, Time
from mlora_operator.api.priorities import Priority
from mlora_worker.bounds import Amount, LongName, Word, cut_to
from mlora_worker.protocol import (
    AdapterDtype,
    AdapterInfo,
    DataCounts,
    DatasetSpec,
    Evaluation,
    FolderUri,
    InitFrom,
    LoRASpec,
    TrainingSpec,
)

KIND = "LoRATask"
PLURAL = "loratasks"


LONGEST_RETRY = 1024  # characters of the annotation mlora.dev/retry that count
Retry = Annotated[str, BeforeValidator(cut_to(LONGEST_RETRY)), Field(max_length=LONGEST_RETRY)]
Seconds = Annotated[int, Field(strict=True, ge=1, le=315_360_000)]  # ten years at most


class Output(Model):
    uri: FolderUri = Field(
        description="Prefix to which the adapter is uploaded: s3://bucket/prefix.",
    )
    overwrite: bool = Field(
        default=False,
        strict=True,
        description="True: replace an existing adapter. False: the task fails before training when an "
        "adapter of another task exists there. This field can be changed at any time.",
    )
    dtype: AdapterDtype = Field(
        default=AdapterDtype.FLOAT32,
        description="float32, bfloat16 or float16: data type of the adapter's file.",
    )
    base_model_name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"\S")] | None = Field(
        default=None,
        description="Value of base_model_name_or_path in adapter_config.json, for users who load the base "
        "model under another name. Default: baseModel.",
    )


class LoRATaskSpec(Model):
    """What the user wants. What is trained, and where it goes, is immutable."""

    base_model: str = Field(
        min_length=1,
        max_length=253,
        description="Name of the base model that a LoRAPipeline serves, such as HuggingFaceTB/SmolLM2-135M-Instruct; "
        "it is written into adapter_config.json.",
    )
    priority: Priority = Field(
        default=0,
        description="Higher values are scheduled first. This field can be changed while the task waits or runs.",
    )
    suspend: bool = Field(
        default=False, strict=True, description="True: release the pipeline's memory and wait."
    )
    start_deadline_seconds: Seconds | None = Field(
        default=None,
        description="The task fails when it is not admitted within this many seconds after its creation or "
        "its last retry. Absent: no limit.",
    )
    active_deadline_seconds: Seconds | None = Field(
        default=None,
        description="The task fails, after a checkpoint, when it does not finish within this many seconds "
        "after its first admission. Absent: no limit.",
    )
    ttl_seconds_after_finished: Annotated[int, Field(strict=True, ge=0, le=315_360_000)] | None = Field(
        default=None,
        description="The task is deleted this many seconds after it succeeded or failed; its adapter and "
        "checkpoints stay. Absent: it is not deleted.",
    )
    lora: LoRASpec = Field(default_factory=LoRASpec, description="The adapter's shape.")
    dataset: DatasetSpec = Field(description="The rows to train on.")
    training: TrainingSpec = Field(default_factory=TrainingSpec, description="Training settings.")
    evaluation: Evaluation | None = Field(
        default=None, description="Evaluation during training. Absent: none."
    )
    init_from: InitFrom | None = Field(
        default=None, description="Start from this adapter instead of a new one."
    )
    output: Output = Field(description="Destination of the adapter.")
    storage: Storage = Field(default_factory=Storage, description="The store of dataset and output.")


class TaskStatus(Status):
    conditions: Annotated[tuple[Condition, ...], Field(max_length=64)] = Field(
        default=(),
        description="Accepted, Admitted, Running, Preempted, UploadBlocked, Succeeded, Failed, Finished.",
    )
    observed_generation: Amount | None = Field(
        default=None, description="The generation of the spec that was last reconciled."
    )
    state: Word | None = Field(
        default=None, description="Summary for kubectl get: the most relevant condition."
    )
    reason: Word | None = Field(default=None, description="Reason of that condition, for kubectl get.")
    pipeline: LongName | None = Field(
        default=None, description="namespace/name of the LoRAPipeline that serves the task."
    )
    step: Amount | None = Field(default=None, description="Completed optimizer steps.")
    total_steps: Amount | None = Field(default=None, description="Total optimizer steps.")
    progress: Word | None = Field(default=None, description="step/totalSteps, for kubectl get.")
    loss: Word | None = Field(default=None, description="Mean loss over the last step's supervised tokens.")
    evaluation_loss: Word | None = Field(
        default=None,
        description="Mean loss over the evaluation rows' supervised tokens, at the last evaluation.",
    )
    best_step: Amount | None = Field(default=None, description="Step with the lowest evaluation loss.")
    best_evaluation_loss: Word | None = Field(default=None, description="The lowest evaluation loss.")
    reward_margin: Word | None = Field(
        default=None,
        description="Of rows of preferences: how much higher the reward of chosen or desirable answers is than that of the "
        "others, in the last step.",
    )
    reward_accuracy: Word | None = Field(
        default=None, description="Part of the pairs whose chosen answer has the higher reward."
    )
    chosen_logps: Word | None = Field(
        default=None, description="Mean log-probability of the chosen or desirable answers in the last step."
    )
    rejected_logps: Word | None = Field(
        default=None,
        description="Mean log-probability of the rejected or undesirable answers in the last step.",
    )
    kl: Word | None = Field(
        default=None,
        description="Of kto: the estimate of the divergence from the reference in the last step.",
    )
    tokens_per_second: Word | None = Field(
        default=None, description="Tokens of this task per second of wall time."
    )
    eta: Word | None = Field(
        default=None,
        description="Time to the last step at tokensPerSecond, as of the last step; only while the task trains.",
    )
    checkpoint_step: Amount | None = Field(
        default=None,
        description="Step of the newest complete checkpoint. Steps after it are repeated after a failure.",
    )
    resumed_step: Amount | None = Field(
        default=None,
        description="Step from which the current run resumed; absent when it started from the beginning.",
    )
    preemptions: Amount | None = Field(default=None, description="How often the task was preempted.")
    restarts: Amount | None = Field(
        default=None, description="How often the task was restarted because its workers ended."
    )
    run: Word | None = Field(
        default=None,
        description="Run of the worker group in which the task trains; another one means a restart.",
    )
    retries: Amount | None = Field(
        default=None, description="How often the failed task was retried on request."
    )
    retry: Retry | None = Field(
        default=None, description="Last observed value of the annotation mlora.dev/retry."
    )
    retry_time: Time = Field(
        default=None, description="Time of the last retry; the start deadline counts from then."
    )
    start_time: Time = Field(default=None, description="When the task was first admitted.")
    completion_time: Time = Field(default=None, description="When the task succeeded or failed.")
    data: DataCounts | None = Field(
        default=None, description="Counts of the rows that were read, used and dropped."
    )
    adapter: AdapterInfo | None = Field(default=None, description="The finished adapter.")
