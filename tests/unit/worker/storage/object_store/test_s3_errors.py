from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    ReadTimeoutError,
)

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.object_store.s3_errors import explain

URL = "http://s3.storage:8333"


def answered(code: str, status: int, message: str = "") -> ClientError:
    response: Any = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(response, "Op")


def told(error: Exception, action: str = "read") -> tuple[FailureReason, str]:
    found = explain(
        error,
        action=action,
        uri="s3://data/rows.jsonl",
        endpoint=URL,
        missing=FailureReason.DATASET_NOT_FOUND,
        secrets=("AKIDKEY", "topsecret", None),
    )
    return found.reason, str(found)


@pytest.mark.parametrize(
    ("error", "reason", "part"),
    [
        (answered("NoSuchKey", 404), "DatasetNotFound", "s3://data/rows.jsonl does not exist"),
        (answered("404", 404), "DatasetNotFound", "s3://data/rows.jsonl does not exist"),
        (
            answered("NoSuchBucket", 404),
            "DatasetNotFound",
            "bucket data of s3://data/rows.jsonl does not exist",
        ),
        (answered("InvalidAccessKeyId", 403), "AccessDenied", "does not know the access key"),
        (answered("SignatureDoesNotMatch", 403), "AccessDenied", "the secret key is wrong"),
        (answered("ExpiredToken", 400), "AccessDenied", "the keys have expired"),
        (answered("RequestTimeTooSkewed", 403), "AccessDenied", "clocks"),
        (answered("AccessDenied", 403), "AccessDenied", "the credentials lack that permission"),
        (answered("403", 403), "AccessDenied", "the credentials lack that permission"),
        (answered("401", 401), "AccessDenied", "the credentials lack that permission"),
        (answered("AuthorizationHeaderMalformed", 400), "InvalidSpec", "set storage.region"),
        (answered("SlowDown", 503), "StorageUnreachable", "answered 503 SlowDown"),
        (answered("InternalError", 500, "oops"), "StorageUnreachable", "answered 500 InternalError (oops)"),
        (
            EndpointConnectionError(endpoint_url=URL),
            "StorageUnreachable",
            "no connection to http://s3.storage:8333",
        ),
        (ConnectTimeoutError(endpoint_url=URL), "StorageUnreachable", "ConnectTimeoutError"),
        (ReadTimeoutError(endpoint_url=URL), "StorageUnreachable", "ReadTimeoutError"),
        (NoCredentialsError(), "AccessDenied", "no credentials were found"),
        (ParamValidationError(report="Invalid bucket name"), "InvalidSpec", "not a valid address"),
        (ValueError("Invalid endpoint: foo"), "InvalidSpec", "Invalid endpoint"),
    ],
)
def test_each_failure_has_a_reason_and_says_what_to_do(error: Exception, reason: str, part: str) -> None:
    found, message = told(error)
    assert found == reason
    assert part in message


@pytest.mark.parametrize(
    ("code", "status", "part"),
    [
        (
            "QuotaExceeded",
            403,
            "full or its quota is exhausted, it answered 403 QuotaExceeded (over the limit)",
        ),
        ("XMinioStorageFull", 507, "full or its quota is exhausted"),
        ("XMinioAdminBucketQuotaExceeded", 400, "full or its quota is exhausted"),
        ("507", 507, "full or its quota is exhausted"),
        ("EntityTooLarge", 400, "does not accept an object of that size"),
        ("413", 413, "does not accept an object of that size"),
    ],
)
def test_a_full_store_is_told_from_one_that_refuses_the_keys(code: str, status: int, part: str) -> None:
    reason, message = told(answered(code, status, "over the limit"), "write")
    assert reason == "InsufficientSpace"
    assert part in message


@pytest.mark.parametrize("status", [400, 411, 501])
def test_a_refused_write_is_an_upload_that_failed(status: int) -> None:
    reason, message = told(answered("Refused", status), "write")
    assert reason == "UploadFailed"
    assert f"cannot write s3://data/rows.jsonl: {URL} answered {status} Refused" in message


@pytest.mark.parametrize(
    ("code", "status"),
    [("SlowDown", 429), ("TooManyRequests", 429), ("RequestTimeout", 400), ("408", 408), ("SlowDown", 503)],
)
@pytest.mark.parametrize("action", ["read", "write"])
def test_a_store_that_is_busy_is_asked_again_whatever_was_asked(code: str, status: int, action: str) -> None:
    reason, message = told(answered(code, status), action)
    assert reason == "StorageUnreachable"
    assert f"answered {status} {code}" in message


@pytest.mark.parametrize(
    ("code", "status", "headers", "seconds"),
    [
        ("SlowDown", 503, {}, 30.0),
        ("SlowDown", 503, {"retry-after": "200"}, 200.0),
        ("429", 429, {"retry-after": "7"}, 7.0),
        ("ServiceUnavailable", 503, {"retry-after": "120"}, 120.0),
        ("ServiceUnavailable", 503, {}, None),
        ("InternalError", 500, {}, None),
    ],
)
def test_a_busy_store_says_how_long_it_wants_to_be_left_alone(
    code: str, status: int, headers: dict[str, str], seconds: float | None
) -> None:
    error = answered(code, status)
    error.response["ResponseMetadata"]["HTTPHeaders"] = headers
    explained = explain(
        error,
        action="read",
        uri="s3://data/rows.jsonl",
        endpoint=URL,
        missing=FailureReason.DATASET_NOT_FOUND,
    )
    assert getattr(explained, "seconds", None) == seconds


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "Other"])
def test_keys_that_the_store_quotes_are_blotted_out(code: str) -> None:
    _, message = told(answered(code, 403, "key AKIDKEY with topsecret is bad"))
    assert "AKIDKEY" not in message
    assert "topsecret" not in message
