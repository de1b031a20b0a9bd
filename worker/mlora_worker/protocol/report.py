"""The report: coordinator to operator. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import (
    Field,
    model_validator,
)

from mlora_worker.bounds import (
    MOST_LACKING,
    MOST_STAGES,
    MOST_TASKS,
    Amount,
    Count,
    Digest,
    Real,
    Seconds,
    Stage,
    Uri,
    Word,
    Words,
    at_most,
)
from mlora_worker.protocol.adapter_config import Rank
from mlora_worker.protocol.dataset import DatasetFormat
from mlora_worker.protocol.message import Message
from mlora_worker.protocol.model import ModelFacts, StageReport


class TaskPhase(StrEnum):
    """Where a task is on its way through the pipeline. Only a preempted one goes back, to Training."""

    PREPARING = "Preparing"  # rows are fetched and tokenised
    PREPARED = "Prepared"  # waits for admission
    TRAINING = "Training"  # from its load item to its last step
    PREEMPTED = (
        "Preempted"  # left the pipeline, its checkpoint is written; waits for admission, then trains on
    )
    SAVING = "Saving"  # adapter is gathered, checked, uploaded
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class FailureReason(StrEnum):
    """Why a task failed in the worker; the operator copies it into the Failed condition's reason."""

    DATASET_NOT_FOUND = "DatasetNotFound"
    ACCESS_DENIED = "AccessDenied"
    STORAGE_UNREACHABLE = "StorageUnreachable"
    INVALID_ROW = "InvalidRow"
    NO_TRAINABLE_ROWS = "NoTrainableRows"
    NO_TRAINABLE_TOKENS = "NoTrainableTokens"
    ROW_TOO_LONG = "RowTooLong"
    UNKNOWN_TARGET_MODULE = "UnknownTargetModule"
    INVALID_SPEC = "InvalidSpec"
    NON_FINITE_LOSS = "NonFiniteLoss"
    INVALID_ADAPTER = "InvalidAdapter"
    UPLOAD_FAILED = "UploadFailed"
    OUTPUT_EXISTS = "OutputExists"  # from format 4 of a report on
    INSUFFICIENT_SPACE = "InsufficientSpace"
    OUT_OF_MEMORY = "OutOfMemory"
    CHECKPOINT_MISMATCH = "CheckpointMismatch"
    INTERNAL_ERROR = "InternalError"


class Failure(Message):
    reason: FailureReason
    message: Words


LONGEST_FILE = 512  # characters of a file's address in a status
FileName = Annotated[str, Field(max_length=LONGEST_FILE)]


class DataCounts(Message):
    """Counts of the rows. ``dropped`` maps a rule's name to a count; ``first_dropped`` to its first line numbers."""

    # From report format 8 on, or left out:
    format: DatasetFormat | None = Field(
        default=None, description="Format of the rows: that of the spec, or what was detected."
    )
    rows: Amount = Field(description="Rows read.")
    used: Amount = Field(description="Rows that are used for training.")
    dropped: Annotated[dict[Word, Amount], Field(max_length=256), at_most(256)] = Field(
        default={}, description="Dropped rows, counted by the name of the rule."
    )
    first_dropped: Annotated[
        dict[Word, Annotated[tuple[Amount, ...], Field(max_length=1024, fail_fast=True)]],
        Field(max_length=256),
        at_most(256),
    ] = Field(default={}, description="First line numbers that each rule dropped.")
    # From report format 6 on, or left out:
    first_dropped_in: (
        Annotated[
            dict[Word, Annotated[tuple[FileName, ...], Field(max_length=1024, fail_fast=True)]],
            Field(max_length=256),
            at_most(256),
        ]
        | None
    ) = Field(default=None, description="Of several files, the one that each of these lines is in.")
    truncated: Amount = Field(default=0, description="Rows cut to maxSeqLength.")
    # From report format 3 on, or left out:
    special_tokens: Amount | None = Field(
        default=None, description="Usable rows whose own text contains special tokens, such as <|im_end|>."
    )
    held_out: Amount = Field(default=0, description="Rows that are held out for evaluation.")
    beyond_limit: Amount = Field(default=0, description="Usable rows that dataset.limit excludes.")
    tokens: Amount = Field(default=0, description="Tokens of all used rows.")
    supervised_tokens: Amount = Field(
        default=0, description="Supervised tokens of all used rows; the loss is computed on them."
    )


class AdapterInfo(Message):
    uri: Uri = Field(description="Prefix of the adapter's files.")
    sha256: Digest = Field(description="SHA-256 of the weights' file.")
    bytes: Amount = Field(description="Size of all files together.")
    max_lora_rank: Rank | None = Field(
        default=None,
        description="The smallest --max-lora-rank with which vLLM can serve it; written by the operator.",
    )


class PreferenceRecord(Message):
    """Means over the pairs of a step or an evaluation, or over its desirable answers (chosen) and its undesirable ones
    (rejected), of which there may be none. A reward is beta times an answer's log-probability, less that under the
    reference where there is one. What may be left out is so from report format 10 on."""

    chosen_reward: Real | None = None
    rejected_reward: Real | None = None
    margin: Real | None = None  # of the former over the latter
    accuracy: Real | None = None  # part of the pairs whose chosen answer has the higher reward
    chosen_logps: Real | None = (
        None  # log-probabilities of the answers; of simpo, orpo and cpo's ipo, per token
    )
    rejected_logps: Real | None = None
    kl: Real | None = None  # of kto, its estimate of the divergence from the reference

    @property
    def is_of_pairs(self) -> bool:
        """It has what every record had before report format 10, and nothing else."""
        return self.accuracy is not None and self.kl is None


class StepRecord(Message):
    """One finished optimizer step. ``loss`` is the mean over the step's supervised tokens, or over its pairs, before the
    update."""

    step: Count
    loss: Real | None  # None: the step had no supervised token
    learning_rate: Real
    grad_norm: Real | None
    tokens: Amount
    preference: PreferenceRecord | None = None  # of a step of pairs


class EvaluationRecord(Message):
    """The adapter after ``step`` steps, on rows that it was not trained on, without dropout."""

    step: Amount  # 0: before the first one
    loss: Real  # mean cross entropy over the evaluation rows' supervised tokens, or mean of the objective over its rows
    token_accuracy: Real  # part of these tokens, of preferences the chosen answers' ones, that the model thinks most likely
    tokens: Count  # supervised
    # From report format 8 on, or left out: of rows of preferences.
    preference: PreferenceRecord | None = None


class TaskReport(Message):
    uid: Word
    phase: TaskPhase
    step: Amount = 0
    total_steps: Amount = 0
    loss: Real | None = None
    evaluation: EvaluationRecord | None = None  # the newest
    best: EvaluationRecord | None = None  # the lowest loss so far
    # From format 8 on, or left out: of the last step, of a task that learns to prefer.
    preference: PreferenceRecord | None = None
    tokens_per_second: Real | None = None
    data: DataCounts | None = None
    adapter: AdapterInfo | None = None
    failure: Failure | None = None
    checkpoint_step: Amount | None = None  # of the newest complete checkpoint; a resume begins after it
    resumed_step: Amount | None = None  # where this run took up the task; None: it began anew
    blocked: Failure | None = None  # why its adapter cannot be uploaded at present; tried again with back-off
    # From format 2 on, True or left out:
    crowded_out: bool | None = (
        None  # for want of memory beside others, until one has left or a plan does not admit it
    )
    released: bool | None = (
        None  # it trains or saves, but only its store is in the way: no stage holds any of it
    )

    @model_validator(mode="after")
    def _has_no_more_steps_than_there_are(self) -> TaskReport:
        """Total steps are 0 until its rows are counted."""
        step = max(self.step, self.resumed_step or 0)
        if self.total_steps and step > self.total_steps:
            raise ValueError(f"step {step} is beyond the {self.total_steps} steps in all")
        return self

    @property
    def waits_for_store(self) -> bool:
        """It has a checkpoint or its adapter to store, the store refuses that, and no stage holds any of it. A former
        worker does not say so of checkpoints."""
        return bool(self.released) or (self.phase is TaskPhase.SAVING and self.blocked is not None)


class MemorySample(Message):
    """What one microbatch took of one stage's memory, in bytes above what was there before it came. Other microbatches
    that the stage holds meanwhile are not in it."""

    stage: Stage
    tokens: Amount
    squared_tokens: Amount  # sum over rows of length^2
    supervised: Amount = 0  # positions that the loss is taken of; 0 on all stages but the last
    loss_rows: Amount = 0  # of logits that exist at once
    exact_bytes: Amount = 0  # what adapters add to what is kept: known exactly (stream/footprint.py)
    layer_bytes: Amount = 0  # part of it that a peak may be without
    lowest_group: Amount = 0  # position in the layer of the first adapted input group
    floor_bytes: Amount = 0  # that the norm of the gradients takes at its end, known exactly, too
    kept_bytes: Amount = 0  # between its forward and its backward
    forward_bytes: Amount = 0  # at most, during its forward
    backward_bytes: Amount = 0  # at most, during its backward
    rss_bytes: Amount = 0  # of the whole process after its backward, as the kernel has it; 0: not known
    used_bytes: Amount = (
        0  # of the budget at its peak, with weights, adapters and all else in flight; 0: not known
    )
    item: Amount = 0  # its number in the stream
    seconds: Seconds = 0.0  # of forward and backward together
    calibration: bool = False  # it was made up, and no task's
    # From format 15 on, or left out: rows of one routed expert that were worked on at a time, at most.
    expert_rows: Amount | None = None

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_bytes, self.backward_bytes)


class MemoryExhausted(Message):
    """Memory ran out on a stage though each of these tasks fits alone: they were too many together."""

    stage: Stage
    tasks: Annotated[
        tuple[Word, ...], Field(max_length=MOST_TASKS, fail_fast=True)
    ]  # uids of all that were in training


class WireReport(Message):
    """Bytes that crossed between stages since the start. ``payload`` is hidden states and their gradients alone."""

    payload_bytes: Amount = Field(default=0, description="Hidden states and their gradients.")
    descriptor_bytes: Amount = Field(default=0, description="Descriptors of the items, labels with them.")
    tokens: Amount = Field(default=0, description="Trained tokens; each is counted once.")
    microbatches: Amount = Field(default=0, description="Microbatches of training and evaluation.")
    concurrent_tasks: Amount = Field(
        default=0, description="Maximum number of tasks with a step in the pipeline at the same time."
    )


MOST_SAMPLES = 64 * MOST_STAGES


class Report(Message):
    """The coordinator's whole state. ``run_id`` is new with every start of the group (a rendezvous)."""

    run_id: Word
    sequence: Amount
    plan_generation: Amount
    ready: bool  # all stages have loaded the model
    facts: ModelFacts | None = None
    stages: Annotated[tuple[StageReport, ...], Field(max_length=MOST_STAGES, fail_fast=True)] = ()
    tasks: Annotated[tuple[TaskReport, ...], Field(max_length=MOST_TASKS, fail_fast=True)] = ()
    memory: Annotated[
        tuple[MemorySample, ...], Field(max_length=MOST_SAMPLES, fail_fast=True)
    ] = ()  # the newest of each stage
    exhausted: Annotated[
        tuple[MemoryExhausted, ...], Field(max_length=256, fail_fast=True)
    ] = ()  # the newest
    wire: WireReport = WireReport()
    # From format 3 on: digests of texts that it needs next. Left out: it takes texts in plans alone.
    lacks: Annotated[tuple[Digest, ...], Field(max_length=MOST_LACKING, fail_fast=True)] | None = None
    # From format 5 on, or left out: bytes of each stage's budget that tasks hold which do not train there now, such as
    # states on their way to a store. What a task in training takes is not in it.
    held: Annotated[tuple[Amount, ...], Field(max_length=MOST_STAGES, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _is_of_these_stages(self) -> Report:
        if self.facts is not None and self.stages:
            stages = [module.stage for module in self.facts.modules]
            stages += [shape.stage for shape in self.facts.experts or ()]
            stages += [module.stage for module in self.facts.never_adapted or ()]
            stages += [shape.stage for shape in self.facts.states or ()]
            far = max(stages, default=-1)
            if far >= len(self.stages):
                raise ValueError(
                    f"facts: a module is on stage {far}, and there are {len(self.stages)} stages"
                )
            borders = self.facts.borders
            if borders is not None and len(borders) != len(self.stages):
                raise ValueError(f"facts: {len(borders)} borders, and there are {len(self.stages)} stages")
        return self

    def as_understood_by(self, format: int) -> Report:
        """Without the fields that came after ``format``: an operator refuses a whole report with a field that it does not
        know, and would take its workers for lost. Whoever adds a field counts ``REPORT_FORMAT`` up, and leaves it out here.
        """
        later = [name for name, since in (("lacks", 3), ("held", 5)) if format < since]
        known = self.model_copy(update=dict.fromkeys(later)) if later else self
        if format < 7:
            new = {"parameters": None, "products": None, "quantized": None}
            stages = tuple(stage.model_copy(update=new) for stage in known.stages)
            known = known.model_copy(update={"stages": stages})
        if format < 13:
            stages = tuple(stage.model_copy(update={"recurrence": None}) for stage in known.stages)
            known = known.model_copy(update={"stages": stages})
        if format < 12 and known.facts is not None and known.facts.experts is not None:
            unknown = {"swapped": None} if format == 11 else {"swapped": None, "path": None}
            shapes = tuple(shape.model_copy(update=unknown) for shape in known.facts.experts)
            facts = known.facts.model_copy(update={"experts": None if format < 9 else shapes})
            known = known.model_copy(update={"facts": facts})
        if format < 14 and known.facts is not None:
            new = {"borders": None, "never_adapted": None}
            known = known.model_copy(update={"facts": known.facts.model_copy(update=new)})
        if format < 15 and any(sample.expert_rows is not None for sample in known.memory):
            told = tuple(sample.model_copy(update={"expert_rows": None}) for sample in known.memory)
            known = known.model_copy(update={"memory": told})
        if format < 15 and known.facts is not None and known.facts.states is not None:
            known = known.model_copy(update={"facts": known.facts.model_copy(update={"states": None})})
        return known.model_copy(update={"tasks": tuple(_understood_by(format, task) for task in self.tasks)})


def _understood_by(format: int, task: TaskReport) -> TaskReport:
    later: dict[str, object] = {}
    if format < 2 and (task.crowded_out or task.released):
        later |= {"crowded_out": None, "released": None}
    fields_since = (("special_tokens", 3), ("first_dropped_in", 6), ("format", 8))
    unknown = [name for name, since in fields_since if format < since]
    if unknown and task.data is not None:
        later["data"] = task.data.model_copy(update=dict.fromkeys(unknown))
    if format < 10:
        later |= {"preference": None} if _is_unknown(task.preference, format) else {}
        later |= {
            field: record.model_copy(update={"preference": None})
            for field, record in (("evaluation", task.evaluation), ("best", task.best))
            if record is not None and _is_unknown(record.preference, format)
        }
        data = later.get("data", task.data)
        if isinstance(data, DataCounts) and data.format is DatasetFormat.UNPAIRED_PREFERENCE:
            later["data"] = data.model_copy(update={"format": None})
    if format < 4:
        later |= {
            field: told.model_copy(update={"reason": FailureReason.UPLOAD_FAILED})
            for field, told in (("failure", task.failure), ("blocked", task.blocked))
            if told is not None and told.reason is FailureReason.OUTPUT_EXISTS
        }
    return task.model_copy(update=later) if later else task


def _is_unknown(record: PreferenceRecord | None, format: int) -> bool:
    return record is not None and (format < 8 or not record.is_of_pairs)
