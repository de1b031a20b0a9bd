"""What a command asks a worker process without training: one question on standard input, one answer on standard output.

The process runs where its user is, and as the user: it may read files, and takes the keys that the SDK finds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError

from mlora_worker.data.errors import DataError
from mlora_worker.model.errors import ModelError
from mlora_worker.protocol import Failure, FailureReason, Message, StorageAccess
from mlora_worker.storage.base_model.model_source import RemoteAccess
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.object_store.s3 import DEFAULT_TIMEOUTS, S3Timeouts
from mlora_worker.storage.object_store.s3_client import S3Options
from mlora_worker.storage.object_store.store import Store, open_store, open_store_from_files

Question = TypeVar("Question", bound=Message)
ALL_NETWORKS = ("0.0.0.0/0", "::/0")  # who asks, and who reads, are one and the same
_EXIT_USAGE = 2
_LONGEST_MESSAGE = 2048  # characters


def reply(program: str, kind: type[Question], answer: Callable[[Question], Message]) -> None:
    """``program`` is how errors name the process. Ends it with exit code 2 when the question is not understood."""
    try:
        question = kind.model_validate_json(sys.stdin.read())
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, item["loc"])) for item in error.errors())
        print(f"{program}: the question is not valid: {fields}", file=sys.stderr)
        raise SystemExit(_EXIT_USAGE) from None
    print(answer(question).to_json())


def users_store(
    access: StorageAccess,
    timeouts: S3Timeouts = DEFAULT_TIMEOUTS,
    missing: FailureReason = FailureReason.INVALID_SPEC,
) -> Store:
    """With the keys of ``access``, or without any there with those of the machine. ``missing``: the reason of what is not
    there. The endpoint may come from the environment, as the AWS tools read it: known here, since it decides how a bucket
    is addressed.
    """
    found = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    if access.endpoint is None:
        access = access.model_copy(update={"endpoint": next(filter(None, found), None)})
    if access.access_key is None:
        return open_store_from_files(
            access.endpoint,
            access.region,
            None,
            allow_files=True,
            timeouts=timeouts,
            missing=missing,
            options=S3Options.of(access),
        )
    return open_store(
        access, allow_files=True, allowed_networks=ALL_NETWORKS, timeouts=timeouts, missing=missing
    )


def users_remote(
    access: StorageAccess, hub_endpoint: str, timeouts: S3Timeouts = DEFAULT_TIMEOUTS
) -> RemoteAccess:
    """For a model on a hub or on the web, of which configuration and tokenizer are read."""
    token = access.hub_token.get_secret_value().strip() if access.hub_token is not None else ""
    return RemoteAccess(
        hub_endpoint=hub_endpoint,
        hub_token=lambda: token or None,
        allowed_networks=ALL_NETWORKS,
        timeouts=timeouts,
    )


def failure_of(error: ModelError | StorageError | DataError) -> Failure:
    return Failure(reason=error.reason, message=str(error)[:_LONGEST_MESSAGE])
