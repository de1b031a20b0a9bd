"""From an SDK's exception to an error that a user can act on. Pure."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from functools import partial

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    SSLError,
)

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.busy import asked_seconds, busy
from mlora_worker.storage.errors import (
    AccessRefused,
    ObjectNotFound,
    StorageError,
    StoreUnreachable,
    UselessAnswer,
)
from mlora_worker.storage.uri import s3_address

# HEAD answers have no body: there the SDK puts the HTTP status in place of the code.
_MISSING = {"NoSuchKey", "NotFound", "404"}
_UNKNOWN_KEY = {"InvalidAccessKeyId", "InvalidClientTokenId"}
_WRONG_SECRET = {"SignatureDoesNotMatch"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}
_OTHER_REGION = {
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "TemporaryRedirect",
    "301",
    "307",
    "IllegalLocationConstraintException",
}
_FULL = {  # AWS has no quotas; these are the words of Ceph, MinIO, SeaweedFS and others
    "QuotaExceeded",
    "QuotaExceededException",
    "BucketQuotaExceeded",
    "XMinioAdminBucketQuotaExceeded",
    "XMinioStorageFull",
    "InsufficientCapacity",
    "InsufficientStorage",
    "InsufficientStorageSpace",
    "StorageFull",
    "507",
}
_TOO_LARGE = {"EntityTooLarge", "413"}
_BUSY = {
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "TooManyRequests",
    "TooManyRequestsException",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "BandwidthLimitExceeded",
}
_MISSING_CHECKSUM = {
    "MissingContentMD5",
    "MissingChecksum",
    "InvalidDigest",
    "BadDigest",
    "XAmzContentChecksumMismatch",
}
# Another attempt may work; 501 says that the store will never do it.
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_PASSING_CODES = {
    "RequestTimeout",
    "RequestTimeoutException",
}  # S3 itself answers 400 to a body that came too slowly


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def is_missing(error: ClientError) -> bool:
    return code_of(error) in _MISSING


def is_passing(error: ClientError) -> bool:
    """The store is busy, or away for a moment."""
    return status_of(error) in _PASSING or code_of(error) in _PASSING_CODES


def status_of(error: ClientError) -> int:
    """Of HTTP; 0 where the error is none of an answer."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def explain(
    error: Exception,
    *,
    action: str,
    uri: str,
    endpoint: str | None,
    missing: FailureReason,
    secrets: Collection[str | None] = (),
) -> StorageError:
    """``action`` is what was tried: read, write, delete, list. ``missing`` is the reason when the object is
    not there. ``secrets`` are blotted out wherever the store quotes them.
    """
    where = endpoint or "AWS S3"
    if isinstance(error, ClientError):
        return _answered(error, action, uri, where, missing, secrets)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return AccessRefused(
            f"cannot {action} {uri}: no credentials were found: set storage.secretRef to a Secret with "
            f"AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    if isinstance(error, SSLError):
        return StoreUnreachable(
            f"cannot {action} {uri}: the certificate of {where} is not trusted; put the certificate that signed it "
            f"into "
            f"ca.crt of the storage Secret ({_clean(str(error), secrets)})"
        )
    if isinstance(error, ConnectionError | HTTPClientError):
        return StoreUnreachable(
            f"cannot {action} {uri}: there is no connection to {where} ({type(error).__name__}): check the endpoint, "
            f"and that the store is running"
        )
    if isinstance(error, ParamValidationError):
        return StorageError(
            FailureReason.INVALID_SPEC, f"{uri} is not a valid address: {_clean(str(error), secrets)}"
        )
    if isinstance(error, BotoCoreError):
        return StoreUnreachable(f"cannot {action} {uri} at {where}: {_clean(str(error), secrets)}")
    return StorageError(
        FailureReason.INVALID_SPEC, f"storage endpoint {where}: {_clean(str(error), secrets)}"
    )


def _answered(
    error: ClientError,
    action: str,
    uri: str,
    where: str,
    missing: FailureReason,
    secrets: Collection[str | None],
) -> StorageError:
    code = code_of(error)
    status = status_of(error)
    if code == "NoSuchBucket":
        bucket = s3_address(uri).bucket
        return ObjectNotFound(
            missing, f"bucket {bucket} of {uri} does not exist at {where}: create it or correct the address"
        )
    if code in _MISSING:
        return ObjectNotFound(
            missing, f"{uri} does not exist at {where}: correct the address or upload the object"
        )
    if code in _UNKNOWN_KEY:
        return AccessRefused(
            f"cannot {action} {uri}: {where} does not know the access key; correct the storage Secret"
        )
    if code in _WRONG_SECRET:
        return AccessRefused(
            f"cannot {action} {uri}: {where} says the secret key is wrong; correct the storage Secret"
        )
    if code in _EXPIRED:
        return AccessRefused(
            f"cannot {action} {uri}: {where} says the keys have expired; renew the storage Secret"
        )
    if code == "RequestTimeTooSkewed":
        return AccessRefused(
            f"cannot {action} {uri}: the clocks of {where} and of this node differ too much: synchronise them"
        )
    said = _clean(str(error.response.get("Error", {}).get("Message", "")), secrets)
    quoted = f" ({said})" if said else ""
    if status == 507 or code in _FULL:  # before the rights: Ceph answers 403
        return StorageError(
            FailureReason.INSUFFICIENT_SPACE,
            f"cannot {action} {uri}: {where} is full or its quota is exhausted, it answered {status} {code}{quoted}; "
            f"make "
            "room there or raise the quota",
        )
    if status == 413 or code in _TOO_LARGE:
        return StorageError(
            FailureReason.INSUFFICIENT_SPACE,
            f"cannot {action} {uri}: {where} does not accept an object of that size, it answered {status} "
            f"{code}{quoted}",
        )
    wants = _wanted(code, said)
    if wants is not None:
        kind = AccessRefused if status in (401, 403) else partial(StorageError, FailureReason.INVALID_SPEC)
        return kind(f"cannot {action} {uri}: {where} answered {status} {code}{quoted}; {wants}")
    if status in (401, 403) or code in ("AccessDenied", "401", "403"):
        demands = (
            ". A policy may demand that a write asks for encryption: storage.serverSideEncryption and "
            "storage.kmsKeyId; or "
            "for a checksum: storage.checksums: whenSupported"
        )
        return AccessRefused(
            f"may not {action} {uri} at {where}: the credentials lack that permission, or the bucket's policy "
            f"forbids it" + (demands if action == "write" else "")
        )
    if code in _OTHER_REGION:
        return StorageError(
            FailureReason.INVALID_SPEC,
            f"cannot {action} {uri}: {where} says the region is wrong; set storage.region",
        )
    message = f"cannot {action} {uri}: {where} answered {status} {code}{quoted}"
    asked = _asked(error)
    if status == 429 or code in _BUSY or (is_passing(error) and asked is not None):
        return busy(message, asked, datetime.now(UTC))
    if action == "write" and not is_passing(error):
        return StorageError(FailureReason.UPLOAD_FAILED, message)
    about_itself = is_passing(error) or not 0 < status < 500  # and not about this object
    return StoreUnreachable(message) if about_itself else UselessAnswer(message)


def _wanted(code: str, said: str) -> str | None:
    """Which field of ``storage`` is in question, where the store's words tell."""
    words = f"{code} {said}".lower()
    if (
        ("customer" in words and "encrypt" in words)
        or "sse-c" in words
        or "correct parameters must be provided" in words
    ):
        return "encryption with keys that each request carries (SSE-C) is not supported: choose AES256 or aws:kms"
    if code.startswith("KMS.") or "kms" in words:
        return (
            "correct storage.kmsKeyId, let the keys of the storage Secret use that key of KMS (kms:GenerateDataKey, "
            "kms:Decrypt), or choose another storage.serverSideEncryption"
        )
    if "encrypt" in words or "server side" in words or "server-side" in words:
        return "set storage.serverSideEncryption (and storage.kmsKeyId) to what the bucket demands, or leave it out"
    if (
        code in _MISSING_CHECKSUM
        or "content-md5" in words
        or "x-amz-checksum" in words
        or "checksum" in words
    ):
        return "set storage.checksums to whenSupported if the store demands checksums, to whenRequired if it knows none"
    return None


def _asked(error: ClientError) -> float | None:
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    plain = {str(name): str(value) for name, value in headers.items()} if isinstance(headers, dict) else {}
    return asked_seconds(plain, datetime.now(UTC))


def _clean(text: str, secrets: Collection[str | None]) -> str:
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    return text[:500]
