"""How a user's task is trained and evaluated (part of the LoRATask spec). Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import (
    Field,
)

from mlora_worker.protocol.message import DatasetUri, Message
from mlora_worker.protocol.objective import Objective


class Schedule(StrEnum):
    """How the learning rate moves after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Overlong(StrEnum):
    """What happens to a row of more than maxSeqLength tokens."""

    TRUNCATE = "truncate"
    TRUNCATE_LEFT = "truncateLeft"
    SKIP = "skip"
    FAIL = "fail"


class OptimizerType(StrEnum):
    """The rule of an update. What weight decay is, training.weightDecay says for all."""

    ADAMW = "adamw"
    LION = "lion"
    ADAMW8BIT = "adamw8bit"  # refused by a rule of the API, which says why


Beta = Annotated[float, Field(strict=True, ge=0, lt=1)]


class Optimizer(Message):
    """Numbers of the update. None stands for what is usual for the type."""

    type: OptimizerType = Field(
        default=OptimizerType.ADAMW,
        description="adamw, or lion, which holds one moment and wants a smaller learning rate.",
    )
    beta1: Beta | None = Field(default=None, description="Decay of the mean of the gradients. Absent: 0.9.")
    beta2: Beta | None = Field(
        default=None,
        description="adamw: decay of the mean of their squares. Absent: 0.999. lion: decay of the mean that is kept. "
        "Absent: 0.99.",
    )
    epsilon: Annotated[float, Field(strict=True, gt=0, le=1)] | None = Field(
        default=None, description="What adamw adds to the denominator. Absent: 1e-8."
    )

    @property
    def betas(self) -> tuple[float, float]:
        usual = 0.99 if self.type is OptimizerType.LION else 0.999
        return (
            0.9 if self.beta1 is None else self.beta1,
            usual if self.beta2 is None else self.beta2,
        )

    @property
    def moments(self) -> int:
        """Numbers in float32 that it keeps of each parameter."""
        return 1 if self.type is OptimizerType.LION else 2

    @property
    def denominator(self) -> float:
        return 1e-8 if self.epsilon is None else self.epsilon


SHORTEST_SEQ_LENGTH = 2  # a token that is learnt, behind one
SeqLength = Annotated[int, Field(strict=True, ge=SHORTEST_SEQ_LENGTH, le=1_048_576)]
USUAL_SEQ_LENGTH = 2048  # of a task that names none, on models that take as much


class TrainingSettings(Message):
    """How to train; the names are those of transformers' TrainingArguments where it has one. What a user writes and what a
    plan says have this in common."""

    objective: Objective | None = Field(
        default=None,
        description="What the adapter is trained for. Absent: the answers of the rows (type: sft).",
    )
    batch_size: Annotated[int, Field(strict=True, ge=1, le=4096)] = Field(
        default=8, description="Rows per mini-batch."
    )
    gradient_accumulation_steps: Annotated[int, Field(strict=True, ge=1, le=4096)] = Field(
        default=1,
        description="Mini-batches per optimizer step; the loss is the mean over all their supervised tokens.",
    )
    epochs: Annotated[int, Field(strict=True, ge=1, le=10000)] = Field(
        default=1, description="Passes over the rows."
    )
    max_steps: Annotated[int, Field(strict=True, ge=1, le=100_000_000)] | None = Field(
        default=None, description="Stop after this many optimizer steps; overrides epochs."
    )
    learning_rate: Annotated[float, Field(strict=True, gt=0, le=10)] = Field(
        default=2e-4, description="Peak learning rate."
    )
    schedule: Schedule = Field(
        default=Schedule.COSINE, description="constant, linear or cosine decay to zero after the warm-up."
    )
    warmup_steps: Annotated[int, Field(strict=True, ge=0, le=100_000_000)] = Field(
        default=0, description="Steps over which the learning rate rises from zero."
    )
    warmup_ratio: Annotated[float, Field(strict=True, ge=0, le=1)] | None = Field(
        default=None,
        description="The same as a fraction of all steps, rounded up. Only one of warmupSteps and warmupRatio can be set.",
    )
    weight_decay: Annotated[float, Field(strict=True, ge=0, le=10)] = Field(
        default=0.0, description="Decoupled weight decay."
    )
    optimizer: Optimizer | None = Field(
        default=None, description="Numbers of the optimizer. Absent: AdamW with the usual ones."
    )
    max_grad_norm: Annotated[float, Field(strict=True, ge=0, le=1e6)] = Field(
        default=1.0, description="Global gradient norm of this adapter to clip to; 0 switches clipping off."
    )
    overlong: Overlong = Field(
        default=Overlong.TRUNCATE,
        description="truncate (keep the beginning), truncateLeft (keep the end), skip or fail on a longer row; counted in "
        "status.data.",
    )
    seed: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] = Field(
        default=42, description="Seed of the adapter's initial weights, the order of rows and dropout."
    )
    checkpoint_every_steps: Annotated[int, Field(strict=True, ge=0, le=100_000_000)] = Field(
        default=50,
        description="Optimizer steps between two checkpoints, which limit how many steps a failure repeats. "
        "0: only when the task is preempted or its worker ends.",
    )

    @property
    def preference(self) -> Objective | None:
        """The objective of a task whose rows are pairs of answers, or single ones that are desirable or not."""
        return self.objective if self.objective is not None and self.objective.prefers else None


class Training(TrainingSettings):
    """As a plan says it, and as it is trained: nothing is left to a model to decide."""

    max_seq_length: SeqLength = 512


class TrainingSpec(TrainingSettings):
    """As a user writes it (part of the LoRATask spec)."""

    max_seq_length: SeqLength | None = Field(
        default=None,
        description=f"Longest row in tokens. Absent: {USUAL_SEQ_LENGTH}, or what the base model takes where that is less.",
    )

    def for_model(self, max_positions: int | None) -> Training:
        """On a model that takes rows of ``max_positions`` tokens (None: nobody knows). What a user asks for stays, also
        where it is more: that is refused in words."""
        longest = self.max_seq_length
        if longest is None:
            most = max_positions if max_positions is not None else USUAL_SEQ_LENGTH
            longest = max(SHORTEST_SEQ_LENGTH, min(USUAL_SEQ_LENGTH, most))
        same = {name: getattr(self, name) for name in TrainingSettings.model_fields}
        return Training(**same, max_seq_length=longest)


class EarlyStopping(Message):
    """When to stop before the last step."""

    patience: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = Field(
        default=3,
        description="Number of consecutive evaluations without an improvement after which training stops.",
    )
    min_delta: Annotated[float, Field(strict=True, ge=0, le=1000)] = Field(
        default=0.0, description="Minimum decrease of the loss that counts as an improvement."
    )


class Evaluation(Message):
    """Rows to evaluate on while training: those of uri, else those that dataset.heldOut keeps from training."""

    uri: DatasetUri | None = Field(
        default=None,
        description="Address of the rows, with the format, the fields and the store of dataset. Absent: the "
        "rows that dataset.heldOut holds out.",
    )
    limit: Annotated[int, Field(strict=True, ge=1, le=1_000_000_000)] | None = Field(
        default=None, description="Use at most this many rows: the first ones."
    )
    every_steps: Annotated[int, Field(strict=True, ge=1, le=100_000_000)] = Field(
        default=50, description="Optimizer steps between two evaluations; the last step is always evaluated."
    )
    early_stopping: EarlyStopping | None = Field(
        default=None, description="Stop when the loss no longer improves. Absent: train to the last step."
    )
    keep_best: Annotated[bool, Field(strict=True)] = Field(
        default=False,
        description="True: publish the adapter of the step with the best evaluation instead of the last step.",
    )
