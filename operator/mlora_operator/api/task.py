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
    Dataset,
    Evaluation,
    FolderUri,
    InitFrom,
    LoRAConfig,
    Training,
)

KIND = "LoRATask"
PLURAL = "loratasks"


LONGEST_RETRY = 1024  # characters of the annotation mlora.dev/retry that count
Retry = Annotated[str, BeforeValidator(cut_to(LONGEST_RETRY)), Field(max_length=LONGEST_RETRY)]
Seconds = Annotated[int, Field(strict=True, ge=1, le=315_360_000)]  # ten years at most


class Output(Model):
    uri: FolderUri = Field(
        description="Prefix that receives the adapter: s3://bucket/prefix.",
    )
    overwrite: bool = Field(
        default=False,
        strict=True,
        description="True: replace an adapter that lies there. False: where one lies that is not this very task's, the "
        "task fails before it trains. May be changed at any time.",
    )
    dtype: AdapterDtype = Field(
        default=AdapterDtype.FLOAT32,
        description="float32, bfloat16 or float16: in which numbers the adapter's file is written.",
    )
    base_model_name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"\S")] | None = Field(
        default=None,
        description="What adapter_config.json says as base_model_name_or_path, for a base that its users load under "
        "another name than baseModel; by default baseModel.",
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
        default=0, description="Higher goes first; may be changed while the task waits or runs."
    )
    suspend: bool = Field(
        default=False, strict=True, description="True: give the place in the pipeline back and wait."
    )
    start_deadline_seconds: Seconds | None = Field(
        default=None,
        description="Fail the task when it has had no place in the pipeline so many seconds after it was made or tried "
        "again; absent: it waits for ever.",
    )
    active_deadline_seconds: Seconds | None = Field(
        default=None,
        description="Fail the task, behind a checkpoint, when it is not done so many seconds after its first place; "
        "absent: it may take as long as it takes.",
    )
    ttl_seconds_after_finished: Annotated[int, Field(strict=True, ge=0, le=315_360_000)] | None = Field(
        default=None,
        description="Delete the task so many seconds after it succeeded or failed; adapter and checkpoints stay. Absent: "
        "it stays.",
    )
    lora: LoRAConfig = Field(default_factory=LoRAConfig, description="The adapter's shape.")
    dataset: Dataset = Field(description="The rows to learn from.")
    training: Training = Field(default_factory=Training, description="How to train.")
    evaluation: Evaluation | None = Field(
        default=None, description="Evaluate while training; absent: it is not evaluated."
    )
    init_from: InitFrom | None = Field(
        default=None, description="Go on from this adapter instead of a fresh one."
    )
    output: Output = Field(description="Where the adapter goes.")
    storage: Storage = Field(default_factory=Storage, description="The store of dataset and output.")


class TaskStatus(Status):
    conditions: Annotated[tuple[Condition, ...], Field(max_length=64)] = Field(
        default=(), description="Accepted, Admitted, Running, Preempted, UploadBlocked, Succeeded, Failed."
    )
    observed_generation: Amount | None = Field(
        default=None, description="The generation of the spec last acted upon."
    )
    state: Word | None = Field(
        default=None, description="One word for kubectl get: the most telling condition."
    )
    reason: Word | None = Field(default=None, description="Reason of that condition, for kubectl get.")
    pipeline: LongName | None = Field(
        default=None, description="namespace/name of the LoRAPipeline that serves the task."
    )
    step: Amount | None = Field(default=None, description="Optimizer steps done.")
    total_steps: Amount | None = Field(default=None, description="Optimizer steps to do.")
    progress: Word | None = Field(default=None, description="step/totalSteps, for kubectl get.")
    loss: Word | None = Field(default=None, description="Mean loss over the last step's supervised tokens.")
    evaluation_loss: Word | None = Field(
        default=None, description="Mean loss over the evaluation rows' supervised tokens, as last evaluated."
    )
    best_step: Amount | None = Field(default=None, description="Step after which that was lowest.")
    best_evaluation_loss: Word | None = Field(default=None, description="The lowest such loss.")
    tokens_per_second: Word | None = Field(
        default=None, description="Tokens of this task per second of wall time."
    )
    checkpoint_step: Amount | None = Field(
        default=None, description="Step of the newest complete checkpoint; what a failure costs begins there."
    )
    resumed_step: Amount | None = Field(
        default=None, description="Step from which the present run went on; absent when it began anew."
    )
    preemptions: Amount | None = Field(
        default=None, description="How often a task that goes first took the place."
    )
    restarts: Amount | None = Field(
        default=None, description="How often the task started again after a failure that was not its own."
    )
    run: Word | None = Field(
        default=None,
        description="Run of the worker group in which the task trains; another one means a restart.",
    )
    retries: Amount | None = Field(
        default=None, description="How often a failed task was tried again on demand."
    )
    retry: Retry | None = Field(
        default=None, description="Value of the annotation mlora.dev/retry that was last seen or acted upon."
    )
    retry_time: Time = Field(
        default=None, description="When the task was last tried again; its start deadline counts from then."
    )
    start_time: Time = Field(default=None, description="When the task was first admitted.")
    completion_time: Time = Field(default=None, description="When the task succeeded or failed.")
    data: DataCounts | None = Field(default=None, description="What became of the rows.")
    adapter: AdapterInfo | None = Field(default=None, description="The finished adapter.")
