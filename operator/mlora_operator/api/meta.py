"""What both resources share: the base model of their types and the Kubernetes condition."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mlora_worker import addresses
from mlora_worker.bounds import Amount, cut_to
from mlora_worker.protocol import (
    Addressing,
    Checksums,
    Encryption,
    EndpointUrl,
    KmsKeyId,
    Message,
    ObjectName,
)

LONGEST_TIME = 64  # characters
LONGEST_MESSAGE = 4096  # characters of a condition's message


class Model(Message):
    """Part of a resource: camelCase, frozen, unknown fields refused."""


class Status(Model, extra="ignore"):
    """A status read back from the API server: what a newer operator wrote there must not break an older one."""


@lru_cache(maxsize=1_000)
def timestamp(moment: datetime) -> str:
    """RFC 3339 with seconds, as the API server writes times."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@lru_cache(maxsize=50_000)
def parse_time(text: str) -> datetime:
    """RFC 3339 as the API server writes it. Raises ValueError or OverflowError for nonsense."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)


_BEGIN = "1970-01-01T00:00:00Z"
_YEARS = range(1970, 9000)  # a time plus or minus any duration of a spec is one, too


def _readable(text: object) -> object:
    """None for what is no time. Whoever may write statuses may have written anything there."""
    try:
        known = not isinstance(text, str) or (len(text) <= LONGEST_TIME and parse_time(text).year in _YEARS)
    except (ValueError, OverflowError):
        known = False
    return text if known else None


_IS_TIME = Field(max_length=LONGEST_TIME, json_schema_extra={"format": "date-time"})
# A time in a status. One that cannot be read is as if it were not there, or in a condition, which has to have one, long
# ago: so no object stops what is decided about all others.
Time = Annotated[Annotated[str, _IS_TIME] | None, BeforeValidator(_readable)]
LastTime = Annotated[str, BeforeValidator(lambda text: _readable(text) or _BEGIN), _IS_TIME]


class Condition(Status):
    """A condition in the Kubernetes sense; ``lastTransitionTime`` moves only when ``status`` does."""

    type: Annotated[str, Field(max_length=64, description="Type of the condition.")]
    status: Annotated[Literal["True", "False", "Unknown"], Field(description="True, False or Unknown.")]
    reason: Annotated[str, Field(max_length=128, description="Reason in one CamelCase word, for programs.")]
    message: Annotated[
        str,
        BeforeValidator(cut_to(LONGEST_MESSAGE)),
        Field(max_length=LONGEST_MESSAGE, description="Explanation for people, with the next step."),
    ] = ""
    observed_generation: Annotated[
        Amount, Field(description="Generation of the spec that the condition describes.")
    ] = 0
    last_transition_time: Annotated[LastTime, Field(description="When status last changed.")]


class SecretReference(Model):
    name: ObjectName = Field(
        description="Name of a Secret in the same namespace with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
    )


class Storage(Model):
    """An S3-compatible store and the Secret with its keys."""

    endpoint: EndpointUrl | None = Field(default=None, description="URL of the S3 endpoint. Default: AWS.")
    region: str = Field(
        default="us-east-1",
        max_length=64,
        pattern=addresses.REGION,
        description="Region to sign requests for.",
    )
    addressing: Addressing = Field(
        default=Addressing.AUTO,
        description="path: http://host/bucket/key, virtual: http://bucket.host/key; auto: path with an endpoint.",
    )
    checksums: Checksums = Field(
        default=Checksums.AUTO,
        description="whenSupported: requests carry the SDK's checksum headers, which many stores do not "
        "support; whenRequired: they do not carry them;"
        " auto: whenRequired with an endpoint.",
    )
    server_side_encryption: Encryption | None = Field(
        default=None,
        description="Server-side encryption of uploads, for stores that require it: AES256, aws:kms or aws:kms:dsse.",
    )
    kms_key_id: KmsKeyId | None = Field(
        default=None, description="Id, ARN or alias of the key for aws:kms; by default the store's own."
    )
    secret_ref: SecretReference | None = Field(
        default=None,
        description="Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and optionally ca.crt (PEM "
        "certificates of authorities that may sign the store's certificate) and HF_TOKEN"
        " for hf:// addresses. "
        "Absent: anonymous (a task) or the workers' own identity (a pipeline).",
    )


class NamespacesFrom(StrEnum):
    SAME = "Same"
    ALL = "All"
    SELECTOR = "Selector"
