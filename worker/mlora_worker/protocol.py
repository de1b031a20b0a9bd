"""What the operator and a pipeline's coordinator say to each other; the one door between the two houses.

``PUT /v1/plan``    a ``Plan``: the operator's whole wish for this pipeline. Idempotent; an older generation is ignored.
``GET /v1/report``  a ``Report``: the whole truth about this pipeline. ``?after=SEQUENCE&wait=SECONDS`` long-polls.
                    ``X-MLoRA-Report: N``: the format that the asker understands (``as_understood_by``); without it, 1.
``PUT /v1/texts/SHA256``  rows or a chat template of a ConfigMap that a plan names by digest and the report ``lacks``.
``GET /v1/timeline``  what every stage did lately: a ``Timeline`` (stream/timeline.py). ``?microbatches=N``: the newest.
``GET /healthz``    200 while the coordinator's threads live; needs no token.

All other bodies are JSON with camelCase names. Every request but ``/healthz`` carries ``Authorization: Bearer <token>``.
The user-facing parts (``LoRAConfig``, ``Dataset``, ``Training``) are the very types that the LoRATask CRD is generated
from, so a value that the API server accepted means the same in the worker. Numbers are strict: ``"1e-4"`` and ``true``
are not numbers.

Both read addresses with one parser (``addresses.py``) and apply one rule about networks, too: ``is_refused``; and one about
what may be shown: ``without_credentials``.

Every number, text and list in here has bounds (``bounds.py``); a test walks all types.

Pure: pydantic only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
)
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    field_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel

from mlora_worker import addresses
from mlora_worker.bounds import (
    MOST_KEY,
    MOST_LACKING,
    MOST_MODULES,
    MOST_PARTS,
    MOST_PATHS,
    MOST_STAGES,
    MOST_TASKS,
    MOST_TEXT,
    Digest,
    Layer,
    Layers,
    LocalPath,
    LongName,
    Name,
    Port,
    Seconds,
    Stage,
    Stages,
    Text,
    Uri,
    Whole,
    Width,
    Word,
    Words,
    at_most,
    cut_to,
)
from mlora_worker.bounds import Amount as Amount
from mlora_worker.bounds import Count as Count
from mlora_worker.bounds import Real as Real

PROTOCOL_VERSION = 1
# 2: TaskReport.crowded_out and released; 3: Report.lacks, DataCounts.special_tokens; 4: FailureReason.OUTPUT_EXISTS
REPORT_HEADER, REPORT_FORMAT = "X-MLoRA-Report", 4
HUB_ENDPOINT = (
    "https://huggingface.co"  # where hf:// addresses lead, unless an administrator names another place
)


class Message(BaseModel):
    """Base of all that crosses a process border: frozen, camelCase, unknown fields refused, NaN never valid."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=True)


# Names of Kubernetes objects: whatever becomes part of a request is one, so that no text of a user is ever a path.
DNS_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
CONFIG_KEY = r"^[-._a-zA-Z0-9]+$"
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_NAME)]
ConfigKey = Annotated[str, Field(min_length=1, max_length=253, pattern=CONFIG_KEY)]

# --- what a user writes (part of the LoRATask spec) ---------------------------------------------------------------


Entry = Annotated[str, Field(min_length=1, max_length=256)]  # name or pattern of modules: stream/targets.py
Rank = Annotated[int, Field(strict=True, ge=1, le=512)]
Alpha = Annotated[float, Field(strict=True, gt=0, le=4096)]


class InitialWeights(StrEnum):
    """How A starts; B starts at zero, so that the adapter begins as the base model."""

    DEFAULT = "default"
    GAUSSIAN = "gaussian"


class LoRAConfig(Message):
    """The adapter's shape, in PEFT's words."""

    rank: Rank = Field(default=16, description="Rank r of the low-rank product; more is a larger adapter.")
    alpha: Alpha = Field(
        default=32,
        description="Scaling: the product is multiplied by alpha / rank, or by alpha / sqrt(rank) with useRslora.",
    )
    dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=0.0,
        description="Probability that an element of the adapter's input is zeroed while training.",
    )
    target_modules: Annotated[tuple[Entry, ...], Field(min_length=1, max_length=64)] = Field(
        default=("q_proj", "v_proj"),
        description="The linear modules that get an adapter: names such as q_proj or ends of paths such as "
        "self_attn.q_proj; patterns, which must match a whole path such as model.layers.3.self_attn.q_proj; or the single "
        "entry all-linear: every linear module of the decoder layers (never the head, never the embeddings).",
    )
    exclude_modules: Annotated[tuple[Entry, ...], Field(max_length=64)] = Field(
        default=(), description="Names or patterns of modules that targetModules has and that get none."
    )
    layers_to_transform: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=0, le=1023)], ...], Field(max_length=1024)
    ] = Field(default=(), description="Numbers of the decoder layers that get an adapter, from 0; none: all.")
    rank_pattern: Annotated[dict[Entry, Rank], Field(max_length=64)] = Field(
        default={},
        description="Other ranks: names, ends of paths or patterns of them, each with the rank of the modules whose path "
        "ends so.",
    )
    alpha_pattern: Annotated[dict[Entry, Alpha], Field(max_length=64)] = Field(
        default={}, description="Other alphas, in the same way."
    )
    use_rslora: Annotated[bool, Field(strict=True)] = Field(
        default=False,
        description="Multiply by alpha / sqrt(rank), which keeps large ranks learning (rsLoRA).",
    )
    init_lora_weights: InitialWeights = Field(
        default=InitialWeights.DEFAULT,
        description="How A starts: default is Kaiming uniform, gaussian has a deviation of 1 / rank. B starts at zero.",
    )

    @property
    def served_rank(self) -> int:
        """The smallest ``--max-lora-rank`` of vLLM under which no module is too large. Ranks end at 512, as there."""
        largest = max((self.rank, *self.rank_pattern.values()))
        return next(rank for rank in SERVED_RANKS if rank >= largest)

    def __hash__(self) -> int:
        """Of all by which users tell many tasks apart: answers are remembered by it, and those of one hash are compared one
        by one."""
        figures = (frozenset(self.rank_pattern.items()), frozenset(self.alpha_pattern.items()))
        modules = (self.target_modules, self.exclude_modules, self.layers_to_transform)
        return hash((self.rank, self.alpha, self.dropout, modules, figures))


# The values that vLLM takes for --max-lora-rank.
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class DatasetFormat(StrEnum):
    """How a row becomes a prompt and an answer."""

    PROMPT_COMPLETION = "promptCompletion"
    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"
    TEXT = "text"


class FileFormat(StrEnum):
    """How rows are written in a file; each may be compressed with gzip or zstd, which its first bytes tell."""

    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


class TrainOn(StrEnum):
    """Which tokens of a row the loss is taken of."""

    LAST_ANSWER = "lastAnswer"
    ALL_ANSWERS = "allAnswers"
    EVERYTHING = "everything"


ColumnName = Annotated[str, Field(min_length=1, max_length=128)]


class DatasetFields(Message):
    """Names of the columns, where they differ from the format's own."""

    prompt: ColumnName = Field(
        default="prompt", description="promptCompletion: the column with the user's turn."
    )
    completion: ColumnName = Field(
        default="completion", description="promptCompletion: the column with the answer to learn."
    )
    messages: ColumnName = Field(
        default="messages", description="messages: the column with the list of role/content turns."
    )
    conversations: ColumnName = Field(
        default="conversations", description="sharegpt: the column with the list of from/value turns."
    )
    instruction: ColumnName = Field(
        default="instruction", description="alpaca: the column with what is asked."
    )
    input: ColumnName = Field(
        default="input", description="alpaca: the column with what it is asked of; it may be absent or empty."
    )
    output: ColumnName = Field(default="output", description="alpaca: the column with the answer to learn.")
    system: ColumnName = Field(
        default="system",
        description="alpaca, sharegpt: the column with a system turn; it may be absent or empty.",
    )
    text: ColumnName = Field(default="text", description="text: the column with the text to learn.")
    weight: ColumnName | None = Field(
        default=None,
        description="The column with a number, 0 or more, that the row's loss is weighted by; absent: all weigh the same.",
    )


class ConfigMapReference(Message):
    name: ObjectName = Field(description="Name of a ConfigMap in the same namespace.")
    key: ConfigKey = Field(
        description="Key with the rows, where what follows its last dot tells the file's format; or with the chat template."
    )


DatasetUri = Annotated[
    str, Field(max_length=1024, pattern=addresses.DATA), AfterValidator(addresses.checked_data)
]
FolderUri = Annotated[
    str, Field(max_length=1024, pattern=addresses.FOLDER), AfterValidator(addresses.checked_folder)
]
ModelUri = Annotated[
    str, Field(max_length=1024, pattern=addresses.MODEL), AfterValidator(addresses.checked_model)
]
EndpointUrl = Annotated[
    str, Field(max_length=512, pattern=addresses.ENDPOINT), AfterValidator(addresses.checked_endpoint)
]


class Dataset(Message):
    """The rows to learn from."""

    uri: DatasetUri | None = Field(
        default=None,
        description="Where the rows lie: s3://bucket/key, https://host/path, hf://datasets/OWNER/NAME/path (file:///path "
        "in `mlora run` only). In s3, file and hf addresses * stands for any part of a name and ** for any folders.",
    )
    uris: Annotated[tuple[DatasetUri, ...], Field(min_length=1, max_length=64)] | None = Field(
        default=None, description="Several such addresses, read one after the other."
    )
    inline: str | None = Field(
        default=None, max_length=65536, description="The rows themselves, for small sets."
    )
    config_map_ref: ConfigMapReference | None = Field(
        default=None, description="A ConfigMap of the task's namespace that holds the rows."
    )
    format: DatasetFormat = Field(
        default=DatasetFormat.PROMPT_COMPLETION,
        description="promptCompletion, messages, sharegpt, alpaca or text.",
    )
    file_format: FileFormat | None = Field(
        default=None,
        description="jsonl, json (an array), csv or parquet; by default what the name's ending says.",
    )
    fields: DatasetFields = Field(
        default_factory=DatasetFields, description="Column names, where they differ from the defaults."
    )
    train_on: TrainOn | None = Field(
        default=None,
        description="lastAnswer, allAnswers or everything; by default allAnswers, and everything for text.",
    )
    chat_template: Annotated[str, Field(min_length=1, max_length=65536)] | None = Field(
        default=None,
        description="A chat template (Jinja) in the place of the base model's own; the adapter has to be served with it.",
    )
    chat_template_ref: ConfigMapReference | None = Field(
        default=None, description="A ConfigMap of the task's namespace that holds the chat template."
    )
    split: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_]+$")] | None = Field(
        default=None,
        description="Of a folder or a hub's data set, only the files of this split, such as train.",
    )
    limit: Annotated[int, Field(strict=True, ge=1, le=1_000_000_000)] | None = Field(
        default=None, description="Use at most this many rows: the first ones, or a sample with shuffleSeed."
    )
    shuffle_seed: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="Take the rows of limit and heldOut at random with this seed."
    )
    held_out: Annotated[float, Field(strict=True, gt=0, le=0.5)] | None = Field(
        default=None, description="Part of the rows that is kept from training, to evaluate on."
    )

    @model_validator(mode="after")
    def _exactly_one_source(self) -> Dataset:
        sources = (self.uri, self.uris, self.inline, self.config_map_ref)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("exactly one of uri, uris, inline and configMapRef must be set")
        return self

    @property
    def addresses(self) -> tuple[str, ...]:
        """As the user wrote them; none for rows that are in the task itself or in a ConfigMap."""
        return self.uris or ((self.uri,) if self.uri is not None else ())

    @property
    def supervised(self) -> TrainOn:
        if self.train_on is not None:
            return self.train_on
        return TrainOn.EVERYTHING if self.format is DatasetFormat.TEXT else TrainOn.ALL_ANSWERS


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


class Training(Message):
    """How to train; the names are those of transformers' TrainingArguments where it has one."""

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
        default=2e-4, description="Peak learning rate of AdamW."
    )
    schedule: Schedule = Field(
        default=Schedule.COSINE, description="constant, linear or cosine decay to zero after the warm-up."
    )
    warmup_steps: Annotated[int, Field(strict=True, ge=0, le=100_000_000)] = Field(
        default=0, description="Steps in which the learning rate rises from zero."
    )
    weight_decay: Annotated[float, Field(strict=True, ge=0, le=10)] = Field(
        default=0.0, description="AdamW's decoupled weight decay."
    )
    max_grad_norm: Annotated[float, Field(strict=True, ge=0, le=1e6)] = Field(
        default=1.0, description="Global gradient norm of this adapter to clip to; 0 switches clipping off."
    )
    max_seq_length: Annotated[int, Field(strict=True, ge=2, le=1_048_576)] = Field(
        default=512, description="Longest row in tokens."
    )
    overlong: Overlong = Field(
        default=Overlong.TRUNCATE,
        description="truncate (keep the beginning), truncateLeft (keep the end), skip or fail on a longer row; counted in "
        "status.data.",
    )
    seed: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] = Field(
        default=42, description="Of the adapter's initial weights, the order of rows and dropout."
    )
    checkpoint_every_steps: Annotated[int, Field(strict=True, ge=0, le=100_000_000)] = Field(
        default=50,
        description="Optimizer steps between two checkpoints, which bound what a failure costs; 0: only when the task "
        "is preempted or its worker ends.",
    )


class EarlyStopping(Message):
    """When to stop before the last step."""

    patience: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = Field(
        default=3, description="Evaluations in a row without an improvement, after which training stops."
    )
    min_delta: Annotated[float, Field(strict=True, ge=0, le=1000)] = Field(
        default=0.0, description="By how much a loss must be lower to be an improvement."
    )


class Evaluation(Message):
    """Rows to evaluate on while training: those of uri, else those that dataset.heldOut keeps from training."""

    uri: DatasetUri | None = Field(
        default=None,
        description="Where the rows lie, in the format, with the fields and from the store of dataset; absent: what "
        "dataset.heldOut keeps from training.",
    )
    limit: Annotated[int, Field(strict=True, ge=1, le=1_000_000_000)] | None = Field(
        default=None, description="Use at most this many of the rows, the first ones."
    )
    every_steps: Annotated[int, Field(strict=True, ge=1, le=100_000_000)] = Field(
        default=50, description="Optimizer steps between two evaluations; the last step is always evaluated."
    )
    early_stopping: EarlyStopping | None = Field(
        default=None, description="Stop when the loss improves no more; absent: never before the last step."
    )
    keep_best: Annotated[bool, Field(strict=True)] = Field(
        default=False,
        description="True: publish the adapter after the step that evaluated best, not after the last one.",
    )


class InitFrom(Message):
    """An adapter to go on from."""

    uri: FolderUri = Field(
        description="A PEFT folder with adapter_config.json and adapter_model.safetensors, in the store of the task: "
        "s3://bucket/prefix. Rank, alpha and modules must be those of lora."
    )


class AdapterDtype(StrEnum):
    """In which numbers the adapter's file is written; training is in float32 whatever it says."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


# --- the plan: operator -> coordinator ----------------------------------------------------------------------------


class Addressing(StrEnum):
    """Where a store has a bucket's name."""

    AUTO = "auto"  # with an endpoint in the path, on AWS as the SDK does
    PATH = "path"
    VIRTUAL = "virtual"


class Checksums(StrEnum):
    """When requests carry the SDK's checksum headers."""

    AUTO = "auto"  # with an endpoint whenRequired, on AWS whenSupported
    WHEN_REQUIRED = "whenRequired"
    WHEN_SUPPORTED = "whenSupported"


StoreKey = Annotated[SecretStr, Field(max_length=MOST_KEY)]


class StorageAccess(Message):
    """An S3-compatible endpoint with the keys to use there. Keys travel in the plan only, never in status or logs."""

    endpoint: EndpointUrl | None = None
    region: Word = "us-east-1"
    addressing: Addressing = Addressing.AUTO
    checksums: Checksums = Checksums.AUTO
    ca_certificate: Text | None = (
        None  # PEM of those who may sign the store's certificate; None: the usual ones
    )
    access_key: StoreKey | None = None
    secret_key: StoreKey | None = None
    session_token: StoreKey | None = None
    hub_token: StoreKey | None = None  # for hf:// data sets

    @field_serializer("access_key", "secret_key", "session_token", "hub_token", when_used="json-unless-none")
    def _reveal(self, value: SecretStr) -> str:
        return value.get_secret_value()


class TaskPlan(Message):
    """One task as the coordinator shall see it. ``admitted`` False: fetch and tokenise its rows, then wait."""

    uid: Annotated[Word, Field(min_length=1)]
    namespace: Name
    name: Name
    generation: Amount | None = None  # of its spec, for logs
    priority: Whole = 0
    admitted: bool = False
    started: bool = (
        False  # it has trained before: what its store refuses is waited out, for its checkpoints may be there
    )
    base_model: Name
    lora: LoRAConfig
    dataset: Dataset
    dataset_text: Text | None = None  # what the ConfigMap of dataset.configMapRef holds
    template_text: Text | None = None  # what the ConfigMap of dataset.chatTemplateRef holds
    # SHA-256 of the same, in their place: for workers whose report has ``lacks``, which are sent each text once.
    dataset_digest: Digest | None = None
    template_digest: Digest | None = None
    training: Training
    evaluation: Evaluation | None = None
    init_from: InitFrom | None = None
    output_uri: FolderUri
    output_dtype: AdapterDtype = AdapterDtype.FLOAT32
    output_overwrite: bool = False  # what lies there may be replaced, whoever's it is
    base_model_name: Name | None = None  # what adapter_config.json says instead of the pipeline's name for it
    storage: StorageAccess = StorageAccess()

    # Of a plan without its rows any more: what they are part of (``storage.artifacts.adapter.fingerprint``).
    _fingerprint: str | None = PrivateAttr(default=None)

    @property
    def chat_template(self) -> str | None:
        """The task's own."""
        return self.dataset.chat_template or self.template_text

    @property
    def digests(self) -> tuple[str, ...]:
        """Of texts that it is without."""
        return tuple(one for one in (self.dataset_digest, self.template_digest) if one is not None)

    @property
    def known_fingerprint(self) -> str | None:
        return self._fingerprint

    def with_texts(self, texts: Mapping[str, str]) -> TaskPlan:
        """With those of ``digests`` that are in ``texts``, which are by digest."""
        update: dict[str, str | None] = {}
        for text, digest in (("dataset_text", self.dataset_digest), ("template_text", self.template_digest)):
            if digest is not None and digest in texts:
                update |= {text: texts[digest], text.replace("text", "digest"): None}
        return self.model_copy(update=update) if update else self

    def without_rows(self, fingerprint: str | None) -> TaskPlan:
        """Once they are prepared: its ``fingerprint`` stays what it was with them."""
        bare = self.model_copy(update={"dataset_text": None})
        bare._fingerprint = fingerprint
        return bare


class Plan(Message):
    """The whole wish. A task that is no longer listed is unloaded and forgotten; its training is abandoned."""

    generation: Amount
    tasks: Annotated[tuple[TaskPlan, ...], Field(max_length=MOST_TASKS)] = ()

    def to_json(self) -> str:
        """Without what is as it is by default: a worker of a former version does not know the newest fields, and has to
        know them only for a task that makes use of them. A default therefore stays what it is for good: what shall be
        another by default gets a new field.
        """
        return self.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True)


# --- the report: coordinator -> operator --------------------------------------------------------------------------


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


class DataCounts(Message):
    """What became of the rows. ``dropped`` maps a rule's name to a count; ``first_dropped`` to its first line numbers."""

    rows: Amount = Field(description="Rows read.")
    used: Amount = Field(description="Rows that are trained on.")
    dropped: Annotated[dict[Word, Amount], Field(max_length=256), at_most(256)] = Field(
        default={}, description="Rows left out, counted by the rule's name."
    )
    first_dropped: Annotated[
        dict[Word, Annotated[tuple[Amount, ...], Field(max_length=1024, fail_fast=True)]],
        Field(max_length=256),
        at_most(256),
    ] = Field(default={}, description="The first line numbers that each rule left out.")
    truncated: Amount = Field(default=0, description="Rows cut to maxSeqLength.")
    # From report format 3 on, or left out:
    special_tokens: Amount | None = Field(
        default=None, description="Usable rows whose own text holds special tokens, such as <|im_end|>."
    )
    held_out: Amount = Field(default=0, description="Rows kept from training, to evaluate on.")
    beyond_limit: Amount = Field(default=0, description="Usable rows that dataset.limit leaves out.")
    tokens: Amount = Field(default=0, description="Tokens of all used rows.")
    supervised_tokens: Amount = Field(
        default=0, description="Tokens of all used rows that the loss is taken of."
    )


class AdapterInfo(Message):
    uri: Uri = Field(description="Prefix of the adapter's files.")
    sha256: Word = Field(description="SHA-256 of the weights' file.")
    bytes: Amount = Field(description="Size of all files together.")
    max_lora_rank: Rank | None = Field(
        default=None,
        description="The smallest --max-lora-rank with which vLLM serves it; written by the operator.",
    )


class StepRecord(Message):
    """One finished optimizer step. ``loss`` is the mean over the step's supervised tokens, before the update."""

    step: Count
    loss: Real | None  # None: the step had no supervised token
    learning_rate: Real
    grad_norm: Real | None
    tokens: Amount


class EvaluationRecord(Message):
    """The adapter after ``step`` steps, on rows that it was not trained on, without dropout."""

    step: Amount  # 0: before the first one
    loss: Real  # mean cross entropy over the evaluation rows' supervised tokens
    token_accuracy: Real  # part of these tokens that the model thinks most likely
    tokens: Count  # supervised


class TaskReport(Message):
    uid: Word
    phase: TaskPhase
    step: Amount = 0
    total_steps: Amount = 0
    loss: Real | None = None
    evaluation: EvaluationRecord | None = None  # the newest
    best: EvaluationRecord | None = None  # the lowest loss so far
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

    @property
    def waits_for_store(self) -> bool:
        """It has a checkpoint or its adapter to store, the store refuses that, and no stage holds any of it. A former
        worker does not say so of checkpoints."""
        return bool(self.released) or (self.phase is TaskPhase.SAVING and self.blocked is not None)


class ModuleShape(Message):
    """A linear module that may be targeted, with its place in the pipeline; the same in consecutive layers of a stage."""

    stage: Stage = Field(description="The stage that holds it.")
    name: Name = Field(description="Last part of the module's path, such as q_proj.")
    in_features: Width = Field(description="Length of its input.")
    out_features: Width = Field(description="Length of its output.")
    count: Layers = Field(description="How many such modules the stage holds, one in each layer.")
    path: LongName = Field(
        default="", description="Its path, with * for the layer: model.layers.*.self_attn.q_proj."
    )
    first_layer: Layer = Field(default=0, description="First of the layers that have it.")

    @property
    def inside(self) -> str:
        """Its path in the layer."""
        return self.path.partition(".*.")[2] or self.name

    def path_in(self, layer: int) -> str:
        return self.path.replace("*", str(layer), 1) if self.path else f"layers.{layer}.{self.name}"


class ModelFacts(Message):
    """What the memory model needs to know of the base model."""

    hidden_size: Width = Field(description="Length of a token's hidden state.")
    intermediate_size: Width = Field(description="Width of the feed-forward part.")
    layers: Layers = Field(description="Decoder layers of all stages.")
    attention_heads: Width = Field(description="Query heads of a layer.")
    vocab_size: Width = Field(description="Entries of the vocabulary.")
    max_positions: Width = Field(description="Longest row in tokens that the model knows positions for.")
    dtype_bytes: Annotated[int, Field(strict=True, ge=1, le=16)] = Field(
        description="Bytes of one frozen weight."
    )
    modules: Annotated[tuple[ModuleShape, ...], Field(max_length=MOST_MODULES, fail_fast=True)] = Field(
        description="The linear modules that may be targeted."
    )

    @model_validator(mode="after")
    def _holds_together(self) -> ModelFacts:
        """Whoever counts modules goes through all layers of each, and keeps the path of each and all ends of that."""
        if sum(module.count for module in self.modules) > MOST_MODULES:
            raise ValueError(f"modules: more than {MOST_MODULES} in all layers together")
        if sum(module.count * len(module.path) for module in self.modules) > MOST_PATHS:
            raise ValueError(f"modules: their paths have more than {MOST_PATHS} characters together")
        for module in self.modules:
            if module.path.count(".") >= MOST_PARTS or module.name.count(".") >= MOST_PARTS:
                raise ValueError(f"modules: a path has more than {MOST_PARTS} parts")
            if module.path and module.first_layer + module.count > self.layers:
                raise ValueError(
                    f"modules: {module.path} would be in layer {module.first_layer + module.count - 1}, and there are "
                    f"{self.layers} layers"
                )
        return self

    def __hash__(self) -> int:
        """Answers are remembered by it: of all modules, it would cost more than they do."""
        return hash((self.hidden_size, self.layers, self.vocab_size, self.dtype_bytes, len(self.modules)))


class StageReport(Message):
    stage: Stage = Field(description="Number of the stage, from 0.")
    first_layer: Layer = Field(description="First decoder layer, from 0.")
    last_layer: Layer = Field(description="Last decoder layer, inclusive.")
    device: Word = Field(description="What it computes on, such as cuda:0.")
    resident_bytes: Amount = Field(description="Bytes of the frozen weights.")
    capacity_bytes: Amount = Field(description="Bytes that the device, or the container's limit, has.")
    input_groups: Annotated[
        tuple[Annotated[tuple[LongName, ...], Field(max_length=MOST_MODULES, fail_fast=True)], ...],
        Field(max_length=4096, fail_fast=True),
    ] = Field(
        default=(),
        description="Linear modules of a layer that read the same input, in the order of their calls.",
    )


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
    tokens: Amount = Field(default=0, description="Tokens trained, each counted once.")
    microbatches: Amount = Field(default=0, description="Microbatches trained, and those of evaluations.")
    concurrent_tasks: Amount = Field(default=0, description="Most tasks with a step in the pipeline at once.")


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

    @model_validator(mode="after")
    def _is_of_these_stages(self) -> Report:
        if self.facts is not None and self.stages:
            far = max((module.stage for module in self.facts.modules), default=-1)
            if far >= len(self.stages):
                raise ValueError(
                    f"facts: a module is on stage {far}, and there are {len(self.stages)} stages"
                )
        return self

    def as_understood_by(self, format: int) -> Report:
        """Without the fields that came after ``format``: an operator refuses a whole report with a field that it does not
        know, and would take its workers for lost. Whoever adds a field counts ``REPORT_FORMAT`` up, and leaves it out here.
        """
        known = self if format >= 3 or self.lacks is None else self.model_copy(update={"lacks": None})
        return known.model_copy(update={"tasks": tuple(_understood_by(format, task) for task in self.tasks)})


def _understood_by(format: int, task: TaskReport) -> TaskReport:
    later: dict[str, object] = {}
    if format < 2 and (task.crowded_out or task.released):
        later |= {"crowded_out": None, "released": None}
    if format < 3 and task.data is not None and task.data.special_tokens is not None:
        later["data"] = task.data.model_copy(update={"special_tokens": None})
    if format < 4:
        later |= {
            field: told.model_copy(update={"reason": FailureReason.UPLOAD_FAILED})
            for field, told in (("failure", task.failure), ("blocked", task.blocked))
            if told is not None and told.reason is FailureReason.OUTPUT_EXISTS
        }
    return task.model_copy(update=later) if later else task


# --- how a rank is started ----------------------------------------------------------------------------------------


class ModelSource(Message):
    name: Name  # the name users write as baseModel, and what adapter_config.json says
    uri: ModelUri  # folder with config.json, tokenizer and *.safetensors: s3://, file://, http(s)://, hf://OWNER/NAME
    revision: Word | None = None
    commit: Word | None = None  # of a hub, that the revision stands for: one for all stages, found by rank 0
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"


class WorkerConfig(Message):
    """Start configuration of every rank of a pipeline, as JSON in ``MLORA_WORKER_CONFIG``; the rank's own number is in
    ``MLORA_RANK``, or the trailing number of ``MLORA_POD_NAME``."""

    pipeline: LongName  # namespace/name, for logs
    model: ModelSource
    stages: Stages
    coordinator_host: LongName  # where rank 0 is reached by the other ranks
    http_port: Port = 8080
    link_port: Port = 29400  # descriptors and reports between ranks
    rendezvous_port: Port = 29500  # torch.distributed's store
    token_file: LocalPath
    tls_dir: LocalPath | None = (
        None  # holds tls.crt and tls.key, re-read when they change; None: all is plain
    )
    storage_endpoint: EndpointUrl | None = None  # of the model; its keys are files below storage_keys_dir
    storage_region: Word = "us-east-1"
    storage_addressing: Addressing = Addressing.AUTO
    storage_checksums: Checksums = Checksums.AUTO
    storage_keys_dir: LocalPath | None = (
        None  # holds AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, perhaps ca.crt, HF_TOKEN; re-read at each use
    )
    cache_dir: LocalPath = "/tmp/mlora"
    checkpoints_uri: FolderUri | None = (
        None  # with the model's keys; None: below each task's own output, with its keys
    )
    termination_seconds: Amount = 60  # between SIGTERM and the end, to write checkpoints
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo", "nccl"] = "auto"  # gloo lets several ranks share a GPU
    threads: Amount = 0  # per rank; 0: torch's default
    microbatch_tokens: Count = 4096  # most tokens of one microbatch; a longer single row travels alone
    recompute_activations: bool = False  # keep a layer's input alone; its forward runs again in the backward
    memory_budget: Count | None = (
        None  # bytes of each rank's allocations, base model included; None: what the device has
    )
    calibrate: bool = True  # measure a few made-up microbatches before the first task is let in
    measure_every: Count = 64  # of microbatches that are like former ones, one in so many is measured
    allow_file_uris: bool = False  # file:// datasets and outputs: `mlora run` only
    allowed_networks: Annotated[
        tuple[Word, ...], Field(max_length=1024)
    ] = ()  # CIDR: http(s) data sets may lie there though it is loopback, link-local, ...
    hub_endpoint: EndpointUrl = HUB_ENDPOINT
    model_cache_bytes: Amount = (
        100 * 2**30
    )  # of a remote model's weights that are kept below cache_dir; 0: none
    dataset_cache_bytes: Amount = 20 * 2**30  # of tokenised rows that are kept below cache_dir
    log_format: Literal["text", "json"] = "text"
    metrics_port: Port | None = None  # of each rank's /metrics, in a pod; None: there is none


# --- what is asked before anything is trained: `mlora plan` asks ``mlora_worker.commands.survey`` over its standard input


class TaskQuestion(Message):
    """A task whose fit to the model, and whose rows, shall be looked at."""

    uid: Word
    lora: LoRAConfig
    dataset: Dataset
    dataset_text: Text | None = None  # what the ConfigMap of dataset.configMapRef holds
    template_text: Text | None = None  # what that of dataset.chatTemplateRef holds
    training: Training
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


# --- what `mlora validate --data` asks ``mlora_worker.commands.inspect_rows`` over its standard input ---


MOST_SHOWN = 10_000  # rows


class LookQuestion(Message):
    """Rows as one task would train on them. Keys may be in it: it travels through a pipe, never as arguments."""

    model: ModelSource  # of it, the tokenizer alone is read
    model_storage: StorageAccess = StorageAccess()  # without keys, the identity that the SDK finds
    storage: StorageAccess = StorageAccess()  # of the rows, in the same way
    hub_endpoint: EndpointUrl = HUB_ENDPOINT
    cache_dir: LocalPath = "/tmp/mlora"
    dataset: Dataset
    training: Training
    show: Annotated[int, Field(strict=True, ge=0, le=MOST_SHOWN)] = 3  # rows to show


class ShownPart(Message):
    """Some of a row's tokens as text; control and special tokens are in it."""

    text: Annotated[str, BeforeValidator(cut_to(MOST_TEXT)), Field(max_length=MOST_TEXT)]
    learnt: bool


class HistogramBar(Message):
    """How many rows have at least ``low`` and less than ``high`` tokens."""

    low: Amount
    high: Amount
    rows: Amount


class LookAnswer(Message):
    """``failure`` set: the task would fail with this, and nothing else is there."""

    counts: DataCounts | None = None
    longest: Amount = 0
    histogram: Annotated[tuple[HistogramBar, ...], Field(max_length=1024)] = ()
    shown: Annotated[
        tuple[Annotated[tuple[ShownPart, ...], Field(max_length=2**21)], ...], Field(max_length=MOST_SHOWN)
    ] = ()  # the first rows
    failure: Failure | None = None


# --- what `mlora export --merged` asks ``mlora_worker.commands.merge`` over its standard input ---


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


# --- the adapter's manifest, written last -------------------------------------------------------------------------

MANIFEST_NAME = "manifest.json"


class ManifestFile(Message):
    name: LongName
    bytes: Amount
    sha256: Word


class AdapterManifest(Message):
    """Written after all files of an adapter; without it, there is no adapter. ``fingerprint`` identifies the task
    (uid and spec), so that a restarted worker knows its own finished work."""

    version: Literal[1] = 1
    task_uid: Word
    namespace: Name
    name: Name
    fingerprint: Word
    base_model: Name
    step: Amount
    loss: Real | None
    evaluation: EvaluationRecord | None = None  # of the published weights
    files: Annotated[tuple[ManifestFile, ...], Field(max_length=1024)]


# --- addresses that only a worker can reach: the operator judges what is written, a worker what it is led to --------

# Metadata services that are not link-local: AWS over IPv6, Alibaba, Oracle, Azure, Google over IPv6.
METADATA_SERVICES = {
    ip_address(address)
    for address in ("fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "fd20:ce::254")
}
_NAT64 = IPv6Network("64:ff9b::/96")  # IPv6 addresses that stand for IPv4 ones


def is_refused(address: IPv4Address | IPv6Address, allowed: Iterable[IPv4Network | IPv6Network]) -> bool:
    """Whether a task's data may not lie there: loopback, link-local, a metadata service, or an IPv6 spelling of one. Not
    in ``allowed`` networks (``WorkerConfig.allowed_networks``).
    """
    networks = tuple(allowed)
    if any(address in network for network in networks if network.version == address.version):
        return False
    inner = embedded_ipv4(address)
    if inner is not None:
        return is_refused(inner, networks)
    return (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address.is_reserved
        or address in METADATA_SERVICES
    )


def embedded_ipv4(address: IPv4Address | IPv6Address) -> IPv4Address | None:
    """The IPv4 address that an IPv6 one stands for."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


# --- what may be shown in logs, statuses and events -----------------------------------------------------------------

# What ends a line somewhere, moves a terminal's cursor, turns text around, or cannot be written at all.
_NOT_OF_A_LINE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def one_line(text: str) -> str:
    """``text`` with everything that is no part of a line spelt out, such as ``\\n``: a text from outside makes no second
    line of a log, and says nothing to a terminal.
    """
    return _NOT_OF_A_LINE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def indented(text: str) -> str:
    """Several lines of a log that belong to the record above them, such as a traceback."""
    return "\n".join(f"  {one_line(line)}" for line in text.split("\n"))


_USER_OF_A_URL = re.compile(r"(?<=://)[^/\s'\"]+@")  # to the last @: a password may have one
_QUERY_OF_A_URL = re.compile(r"(https?://[^\s?'\"]+)\?[^\s\"]*[^\s\"']")  # but the quote that ends it


def without_credentials(text: str) -> str:
    """``text`` with user, password and query of each web address in it as ``***``: a query may be a signature."""
    if "://" not in text:
        return text
    return _QUERY_OF_A_URL.sub(r"\1?***", _USER_OF_A_URL.sub("***@", text))


def without_keys(text: str, access: StorageAccess) -> str:
    """The same, and without the keys of ``access``, which a store may send back in an error."""
    for key in (access.secret_key, access.session_token, access.hub_token, access.access_key):
        value = key.get_secret_value() if key is not None else ""
        if len(value) >= _SHORTEST_KEY:
            text = text.replace(value, "***")
    return without_credentials(text)


_SHORTEST_KEY = 4  # what is shorter is a word in a trial, and would blot out half of the text
