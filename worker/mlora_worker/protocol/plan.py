"""The plan: operator to coordinator. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from pydantic import (
    Field,
    PrivateAttr,
    SecretStr,
    field_serializer,
)

from mlora_worker.bounds import (
    MOST_KEY,
    MOST_TASKS,
    Amount,
    Digest,
    Name,
    Text,
    Whole,
    Word,
)
from mlora_worker.protocol.adapter_config import AdapterDtype, InitFrom, LoRAConfig
from mlora_worker.protocol.dataset import Dataset
from mlora_worker.protocol.message import EndpointUrl, FolderUri, Message
from mlora_worker.protocol.training import Evaluation, Training


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


class Encryption(StrEnum):
    """How a store shall encrypt what is written, in S3's words."""

    AES256 = "AES256"
    KMS = "aws:kms"
    KMS_DSSE = "aws:kms:dsse"


# An id, an ARN or an alias: it becomes a header.
KMS_KEY = r"^[A-Za-z0-9:/_.-]+$"
KmsKeyId = Annotated[str, Field(min_length=1, max_length=2048, pattern=KMS_KEY)]
StoreKey = Annotated[SecretStr, Field(max_length=MOST_KEY)]


class StorageAccess(Message):
    """An S3-compatible endpoint with the keys to use there. Keys travel in the plan only, never in status or logs."""

    endpoint: EndpointUrl | None = None
    region: Word = "us-east-1"
    addressing: Addressing = Addressing.AUTO
    checksums: Checksums = Checksums.AUTO
    server_side_encryption: Encryption | None = None  # None: as the bucket's own settings say
    kms_key_id: KmsKeyId | None = None  # None: the store's own key
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
