"""What the operator's commands ask ``mlora_worker.commands`` over its standard input. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
)

from mlora_worker.bounds import (
    MOST_STAGES,
    MOST_TASKS,
    MOST_TEXT,
    Amount,
    Layer,
    LocalPath,
    Real,
    Stage,
    Stages,
    Text,
    Word,
    Words,
    cut_to,
)
from mlora_worker.protocol.adapter_config import LoRAConfig
from mlora_worker.protocol.dataset import Dataset
from mlora_worker.protocol.message import EndpointUrl, Message
from mlora_worker.protocol.model import ModelFacts, ModelSource
from mlora_worker.protocol.plan import StorageAccess
from mlora_worker.protocol.report import DataCounts, Failure
from mlora_worker.protocol.training import TrainingSpec
from mlora_worker.protocol.worker_config import HUB_ENDPOINT


class TaskQuestion(Message):
    """A task whose fit to the model, and whose rows, shall be looked at."""

    uid: Word
    lora: LoRAConfig
    dataset: Dataset
    dataset_text: Text | None = None  # what the ConfigMap of dataset.configMapRef holds
    template_text: Text | None = None  # what that of dataset.chatTemplateRef holds
    training: TrainingSpec
    storage: StorageAccess | None = None  # None: its rows are not read


class SurveyQuestion(Message):
    """A base model as it would be cut, and tasks for it. Keys are in it: it travels through a pipe, never as arguments."""

    model: ModelSource
    stages: Stages
    storage: StorageAccess = StorageAccess()  # of the model; without keys, the identity that the SDK finds
    hub_endpoint: EndpointUrl = HUB_ENDPOINT
    cache_dir: LocalPath = "/tmp/mlora"
    sample_rows: Amount = 0  # of each data set, at most; 0: none
    tasks: Annotated[tuple[TaskQuestion, ...], Field(max_length=MOST_TASKS)] = ()


class StageShape(Message):
    """What one stage will hold."""

    stage: Stage
    first_layer: Layer
    last_layer: Layer  # inclusive
    parameters: Amount  # of the frozen weights, embedding and head with them
    resident_bytes: Amount  # of the same, as ``StageReport`` measures them
    products: Word | None = (
        None  # the library that multiplies, where a worker has told; None: a worker chooses when it starts
    )
    quantized: bool = False  # its matrices are dense for a pass alone


class RowSummary(Message):
    """Lengths of a task's rows, as they would be trained on."""

    counts: DataCounts
    whole: bool  # every row was read
    mean: Real  # tokens of a row
    deviation: Real  # standard deviation
    longest: Amount


class TaskAnswer(Message):
    uid: Word
    rows: RowSummary | None = None
    failure: Failure | None = None  # the task would fail with this before its first step
    unread: Words | None = None  # why its rows could not be read here, which a cluster may well be able to


class SurveyAnswer(Message):
    """``failure`` set: the model cannot be served so, and nothing else is there."""

    facts: ModelFacts | None = None
    stages: Annotated[tuple[StageShape, ...], Field(max_length=MOST_STAGES)] = ()
    tasks: Annotated[tuple[TaskAnswer, ...], Field(max_length=MOST_TASKS)] = ()
    failure: Failure | None = None


MOST_SHOWN = 10_000  # rows


class LookQuestion(Message):
    """Rows as one task would train on them. Keys may be in it: it travels through a pipe, never as arguments."""

    model: ModelSource  # of it, the tokenizer alone is read
    model_storage: StorageAccess = StorageAccess()  # without keys, the identity that the SDK finds
    storage: StorageAccess = StorageAccess()  # of the rows, in the same way
    hub_endpoint: EndpointUrl = HUB_ENDPOINT
    cache_dir: LocalPath = "/tmp/mlora"
    dataset: Dataset
    training: TrainingSpec
    show: Annotated[int, Field(strict=True, ge=0, le=MOST_SHOWN)] = 3  # rows to show


class ShownPart(Message):
    """Some of a row's tokens as text; control and special tokens are in it."""

    text: Annotated[str, BeforeValidator(cut_to(MOST_TEXT)), Field(max_length=MOST_TEXT)]
    learnt: bool
    # Of a pair: in which of its two sequences it is; of an answer with a label: what that says.
    answer: Literal["chosen", "rejected", "desirable", "undesirable"] | None = None


class HistogramBar(Message):
    """How many rows have at least ``low`` and less than ``high`` tokens."""

    low: Amount
    high: Amount
    rows: Amount


class LookAnswer(Message):
    """``failure`` set: the task would fail with this, and nothing else is there."""

    counts: DataCounts | None = None
    desirable: Amount | None = None  # rows with this label; None: rows have none
    longest: Amount = 0
    histogram: Annotated[tuple[HistogramBar, ...], Field(max_length=1024)] = ()
    shown: Annotated[
        tuple[Annotated[tuple[ShownPart, ...], Field(max_length=2**21)], ...], Field(max_length=MOST_SHOWN)
    ] = ()  # the first rows
    failure: Failure | None = None


class MergeQuestion(Message):
    """Local folders: of a PEFT adapter, of its base with safetensors, and one to make."""

    adapter: LocalPath
    base: LocalPath
    output: LocalPath
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # None: that of the base


class MergeAnswer(Message):
    """``failure`` set: nothing was written."""

    bytes: Amount = 0
    dtype: Word = ""
    failure: Failure | None = None
