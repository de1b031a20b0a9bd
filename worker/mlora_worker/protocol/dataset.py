"""The rows that a user names (part of the LoRATask spec). Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import (
    Field,
    model_validator,
)

from mlora_worker.protocol.message import ConfigKey, DatasetUri, Message, ObjectName


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
