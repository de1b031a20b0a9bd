"""How a store is spoken to: addressing, checksums, whose certificates are trusted; and the client made of it."""

from __future__ import annotations

import atexit
import hashlib
import shutil
import ssl
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import boto3
import botocore.config
import botocore.session
from botocore import UNSIGNED

from mlora_worker import addresses
from mlora_worker.protocol import (
    Addressing,
    Checksums,
    Encryption,
    FailureReason,
    StorageAccess,
    WorkerConfig,
)
from mlora_worker.storage.egress_policy import Destinations
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.object_store.checked_connection import check_connections
from mlora_worker.storage.object_store.s3_answers import watch_answers


@dataclass(frozen=True)
class Keys:
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


class _Ambient:
    """Marker: let the SDK find the identity (environment, shared file, the pod's or machine's role)."""


AMBIENT: Final = _Ambient()
Identity = Keys | _Ambient | None  # None: unsigned requests


@dataclass(frozen=True)
class S3Timeouts:
    """How long a silent store is waited for. An unreachable one is given up after attempts * connect_seconds
    and the SDK's back-off between them.
    """

    connect_seconds: float = 5.0
    read_seconds: float = 60.0
    attempts: int = 4


DEFAULT_TIMEOUTS = S3Timeouts()


@dataclass(frozen=True)
class S3Options:
    """What a store other than AWS may want otherwise, and how it shall encrypt."""

    addressing: Addressing = Addressing.AUTO
    checksums: Checksums = Checksums.AUTO
    server_side_encryption: Encryption | None = None
    kms_key_id: str | None = None

    @property
    def of_writing(self) -> dict[str, str]:
        """What a request says that begins an object."""
        said: dict[str, str] = {}
        if self.server_side_encryption is not None:
            said["ServerSideEncryption"] = self.server_side_encryption.value
        if self.kms_key_id is not None:
            said["SSEKMSKeyId"] = self.kms_key_id
        return said

    @classmethod
    def of(cls, access: StorageAccess) -> S3Options:
        return cls(access.addressing, access.checksums, access.server_side_encryption, access.kms_key_id)

    @classmethod
    def of_pipeline(cls, config: WorkerConfig) -> S3Options:
        return cls(
            config.storage_addressing,
            config.storage_checksums,
            config.storage_server_side_encryption,
            config.storage_kms_key_id,
        )


PLAIN = S3Options()


def new_client(
    endpoint: str | None,
    region: str,
    keys: Identity,
    timeouts: S3Timeouts,
    options: S3Options = PLAIN,
    ca_certificate: str | None = None,
    destinations: Destinations | None = None,
) -> Any:
    """``destinations``: which hosts may be connected to; None: any.

    ``ca_certificate``: PEM of those who may sign the store's certificate; None: the usual ones. Raises StorageError when
    it cannot be read, or the endpoint is no address (InvalidSpec).

    By default, with an endpoint, buckets are part of the path and checksum headers are sent where S3 demands them alone:
    other stores than AWS often know neither bucket host names nor the SDK's checksums (boto/boto3#4392), and the adapter's
    own manifest has SHA-256 sums.
    """
    own = endpoint is not None
    chosen: dict[str, Any] = {}
    if options.addressing is not Addressing.AUTO or own:
        style = Addressing.PATH if options.addressing is Addressing.AUTO else options.addressing
        chosen["s3"] = {"addressing_style": style.value}
    if options.checksums is not Checksums.AUTO or own:
        when = "when_supported" if options.checksums is Checksums.WHEN_SUPPORTED else "when_required"
        chosen |= {"request_checksum_calculation": when, "response_checksum_validation": when}
    if keys is None:
        chosen["signature_version"] = UNSIGNED
    config = botocore.config.Config(
        connect_timeout=timeouts.connect_seconds,
        read_timeout=timeouts.read_seconds,
        retries={"mode": "standard", "total_max_attempts": timeouts.attempts},
        max_pool_connections=16,
        **chosen,
    )
    known: dict[str, Any] = {}
    if isinstance(keys, Keys):
        known = {
            "aws_access_key_id": keys.access_key,
            "aws_secret_access_key": keys.secret_key,
            "aws_session_token": keys.session_token,
        }
    trusted = None if ca_certificate is None else str(_file_of(ca_certificate))
    core = botocore.session.get_session()
    core.register_component("data_loader", _service_models())
    client = boto3.session.Session(botocore_session=core, region_name=region, **known).client(
        "s3", endpoint_url=_checked(endpoint), config=config, verify=trusted
    )
    watch_answers(client)
    if destinations is not None:
        check_connections(client, destinations)
    return client


@cache
def _service_models() -> Any:
    """What the SDK knows of services, read once: a client is made for each use of a store, and to read it takes 85 ms of
    Python, during which other threads wait for the interpreter's lock. It holds nothing of keys."""
    return botocore.session.get_session().get_component("data_loader")


def _checked(endpoint: str | None) -> str | None:
    if endpoint is None:
        return None
    try:
        site = addresses.endpoint(endpoint)
    except addresses.NotAnAddress as error:
        raise StorageError(FailureReason.INVALID_SPEC, f"storage endpoint {error}") from None
    return site.origin + site.path


def _file_of(certificate: str) -> Path:
    """A file with ``certificate``: the SDK takes certificates from files only."""
    try:
        ssl.create_default_context(cadata=certificate)
    except (ssl.SSLError, ValueError):
        raise StorageError(
            FailureReason.INVALID_SPEC,
            "ca.crt of the storage Secret is not a PEM certificate (-----BEGIN CERTIFICATE-----): correct or remove "
            "it",
        ) from None
    path = _folder() / f"{hashlib.sha256(certificate.encode()).hexdigest()}.pem"
    if not path.exists():
        part = path.with_suffix(".partial")
        part.write_text(certificate, encoding="ascii")
        part.replace(path)
    return path


@cache
def _folder() -> Path:
    """Of this process alone, and gone with it."""
    folder = Path(tempfile.mkdtemp(prefix="mlora-certificates-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
