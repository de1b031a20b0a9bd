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
    PREFERENCE = "preference"
    UNPAIRED_PREFERENCE = "unpairedPreference"


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
        default="prompt",
        description="promptCompletion: the column with the user's turn. preference: that with the prompt; it may be "
        "absent where both answers begin with it. unpairedPreference: that with the prompt.",
    )
    completion: ColumnName = Field(
        default="completion",
        description="promptCompletion: the column with the answer to train on. unpairedPreference: that with the answer.",
    )
    label: ColumnName = Field(
        default="label",
        description="unpairedPreference: the column that says whether the answer is desirable.",
    )
    messages: ColumnName = Field(
        default="messages", description="messages: the column with the list of role/content turns."
    )
    conversations: ColumnName = Field(
        default="conversations", description="sharegpt: the column with the list of from/value turns."
    )
    instruction: ColumnName = Field(
        default="instruction", description="alpaca: the column with the instruction."
    )
    input: ColumnName = Field(
        default="input",
        description="alpaca: the column with the input of the instruction; it may be absent or empty.",
    )
    output: ColumnName = Field(
        default="output", description="alpaca: the column with the answer to train on."
    )
    system: ColumnName = Field(
        default="system",
        description="alpaca, sharegpt: the column with a system turn; it may be absent or empty.",
    )
    text: ColumnName = Field(default="text", description="text: the column with the text to train on.")
    chosen: ColumnName = Field(
        default="chosen", description="preference: the column with the answer that is preferred."
    )
    rejected: ColumnName = Field(
        default="rejected", description="preference: the column with the answer that is not."
    )
    weight: ColumnName | None = Field(
        default=None,
        description="The column with the weight of the row's loss, a number of at least 0. Absent: all rows "
        "have the same weight.",
    )


class ConfigMapReference(Message):
    name: ObjectName = Field(description="Name of a ConfigMap in the same namespace.")
    key: ConfigKey = Field(
        description="Key with the rows or the chat template. The extension of a key with rows gives the file format."
    )


class DatasetSettings(Message):
    """All but the format."""

    uri: DatasetUri | None = Field(
        default=None,
        description="Address of the rows: s3://bucket/key, https://host/path, hf://datasets/OWNER/NAME/path (file:///path "
        "in `mlora run` only). In s3, file and hf addresses * matches any part of a name and ** any folders.",
    )
    uris: Annotated[tuple[DatasetUri, ...], Field(min_length=1, max_length=64)] | None = Field(
        default=None, description="Several addresses, which are read in this order."
    )
    inline: str | None = Field(
        default=None, max_length=65536, description="The rows themselves, for small data sets."
    )
    config_map_ref: ConfigMapReference | None = Field(
        default=None, description="A ConfigMap of the task's namespace that holds the rows."
    )
    file_format: FileFormat | None = Field(
        default=None,
        description="jsonl, json (an array), csv or parquet; by default the extension of the file name decides.",
    )
    fields: DatasetFields = Field(
        default_factory=DatasetFields, description="Column names that differ from the defaults."
    )
    train_on: TrainOn | None = Field(
        default=None,
        description="lastAnswer, allAnswers or everything; by default allAnswers, and everything for text.",
    )
    chat_template: Annotated[str, Field(min_length=1, max_length=65536)] | None = Field(
        default=None,
        description="A chat template (Jinja) that replaces the base model's own. The adapter must be served with it.",
    )
    chat_template_ref: ConfigMapReference | None = Field(
        default=None, description="A ConfigMap of the task's namespace that holds the chat template."
    )
    split: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_]+$")] | None = Field(
        default=None,
        description="Read only the files of this split, such as train, from a folder or a hub's data set.",
    )
    limit: Annotated[int, Field(strict=True, ge=1, le=1_000_000_000)] | None = Field(
        default=None, description="Use at most this many rows: the first ones, or a sample with shuffleSeed."
    )
    shuffle_seed: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="Select the rows of limit and heldOut at random with this seed."
    )
    held_out: Annotated[float, Field(strict=True, gt=0, le=0.5)] | None = Field(
        default=None, description="Fraction of the rows that is held out from training for evaluation."
    )

    @model_validator(mode="after")
    def _exactly_one_source(self) -> DatasetSettings:
        sources = (self.uri, self.uris, self.inline, self.config_map_ref)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("exactly one of uri, uris, inline and configMapRef must be set")
        return self

    @property
    def addresses(self) -> tuple[str, ...]:
        """As the user wrote them; none for rows that are in the task itself or in a ConfigMap."""
        return self.uris or ((self.uri,) if self.uri is not None else ())


class Dataset(DatasetSettings):
    """The rows to train on, as a plan says them. ``detect_format``: their keys tell the format, and ``format`` means
    nothing yet."""

    format: DatasetFormat = DatasetFormat.PROMPT_COMPLETION
    detect_format: bool = False

    @property
    def supervised(self) -> TrainOn:
        if self.train_on is not None:
            return self.train_on
        return TrainOn.EVERYTHING if self.format is DatasetFormat.TEXT else TrainOn.ALL_ANSWERS

    def with_format(self, format: DatasetFormat) -> Dataset:
        return self.model_copy(update={"format": format, "detect_format": False})


class DatasetSpec(DatasetSettings):
    """The rows to train on."""

    format: DatasetFormat | None = Field(
        default=None,
        description="promptCompletion, messages, sharegpt, alpaca, text, preference or unpairedPreference. Absent: the "
        "keys of the first rows decide, and status.data.format says which it is.",
    )

    def for_plan(self) -> Dataset:
        same = {name: getattr(self, name) for name in DatasetSettings.model_fields}
        if self.format is None:
            return Dataset(**same, detect_format=True)
        return Dataset(**same, format=self.format)
