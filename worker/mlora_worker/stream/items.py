"""Items of the stream. Each is small, frozen and travels as JSON ahead of the tensors that it describes.

A *microbatch* is a row of packed tokens [tokens] of one or more tasks; a *segment* is one task's part of it. There is no
padding anywhere: a segment is its rows' tokens one after the other, and ``lengths`` says where each row ends.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from mlora_worker.protocol import LoRAConfig, Message, Training


class Update(Message):
    """Close an optimizer step: multiply the task's gradients by ``clip``, apply AdamW with ``learning_rate``, zero them.

    Rides with the task's next item, because the global gradient norm is known only after the backward has come back
    to rank 0: no barrier is needed.
    """

    step: int  # 1-based number of the step that is closed
    learning_rate: float
    clip: float  # in (0, 1]


class Pairs(Message):
    """Of rows that come in pairs, the preferred one first: what their objective needs beside their own sums."""

    # What the chosen rows' cross entropy counts beside the loss of a pair, once the segment's weight is applied.
    likelihood: float = 0.0
    prompts: tuple[int, ...] | None = None  # of each chosen row, tokens whose labels are its prompt's
    reference: tuple[float, ...] | None = None  # of each row, log-probability of its answer there


class Unpaired(Message):
    """Of rows that are answers which are desirable or not: what their objective needs beside their own sums."""

    desirable: tuple[bool, ...]
    reference: tuple[float, ...]  # log-probability of each answer there
    kl: float = 0.0  # the estimate of the divergence from the reference, of the whole step


class Segment(Message):
    """One task's part of a microbatch."""

    task: str  # uid
    step: int  # 1-based optimizer step to which the gradients belong
    lengths: tuple[int, ...]  # tokens of each row
    first_row: int  # ordinal of the first row within the whole step: dropout masks depend on it, not on the splitting
    # 1 / supervised tokens of the whole step, or of preferences 1 / its rows, each as it weighs; 0 when it has none.
    weight: float
    row_weights: tuple[float, ...] | None = None  # of each row's or pair's loss, at most 1; None: all are 1
    pairs: Pairs | None = None  # None: its rows do not come in pairs
    unpaired: Unpaired | None = None  # None: its rows are learnt as they stand, or come in pairs
    closes_step: (
        bool  # no further microbatch belongs to this step: the stage reports its squared gradient norm
    )
    update: Update | None = None  # of the former step, to be applied before this forward
    discard: bool = (
        False  # this step is issued again: zero the gradients of its first try before this forward
    )

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def prefers(self) -> bool:
        """Its objective works on the sum of each row."""
        return self.pairs is not None or self.unpaired is not None


class Train(Message):
    """Forward and backward of one microbatch."""

    kind: Literal["train"] = "train"
    number: int
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)


class Evaluate(Message):
    """Forward of one microbatch of rows of one task, without dropout; the last stage tells rank 0 its scores: of evaluation
    rows sums over all of them, of a ``reference`` each row's log-probability."""

    kind: Literal["evaluate"] = "evaluate"
    number: int
    task: str  # uid
    lengths: tuple[int, ...]  # tokens of each row
    row_weights: tuple[float, ...] | None = None  # as of a segment
    pairs: Pairs | None = None  # as of a segment
    unpaired: Unpaired | None = None  # as of a segment
    # Whose log-probabilities are asked for: the frozen base's, or those of the adapter as it is now.
    reference: Literal["base", "adapter"] | None = None
    update: Update | None = None  # of the last step, to be applied before

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Keep(Message):
    """Every stage sends a copy of its part of the adapter, as it is now, to rank 0; the task goes on."""

    kind: Literal["keep"] = "keep"
    number: int
    task: str


class Load(Message):
    """A task joins: every stage makes its part of the adapter, or takes it up from the state that comes along."""

    kind: Literal["load"] = "load"
    number: int
    task: str
    lora: LoRAConfig
    training: Training
    updates: int | None = (
        None  # that AdamW had made when the state was saved; 0: another adapter's weights; None: a fresh start
    )


class Checkpoint(Message):
    """Every stage applies the last update and sends a copy of its part of the task's state to rank 0; the task goes on."""

    kind: Literal["checkpoint"] = "checkpoint"
    number: int
    task: str
    update: Update | None = None


class Save(Message):
    """Every stage applies the last update and sends its part of the adapter to rank 0."""

    kind: Literal["save"] = "save"
    number: int
    task: str
    update: Update | None = None


class Unload(Message):
    """A task leaves: every stage forgets it."""

    kind: Literal["unload"] = "unload"
    number: int
    task: str


class Stop(Message):
    """The stream ends; ranks return from their loop."""

    kind: Literal["stop"] = "stop"
    number: int


Item = Annotated[
    Train | Evaluate | Keep | Load | Checkpoint | Save | Unload | Stop, Field(discriminator="kind")
]
ITEM: TypeAdapter[Item] = TypeAdapter(Item)
