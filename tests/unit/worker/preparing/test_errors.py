"""Errors that cross from the preparation process to the rank."""

from __future__ import annotations

import errno

import pytest

from mlora_worker.coordinator.task.failure_reason import is_the_machines, reason_of
from mlora_worker.data.errors import DataError, Interrupted
from mlora_worker.preparing.errors import error_of, failed_message
from mlora_worker.preparing.messages import Failed
from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import (
    AccessRefused,
    ObjectNotFound,
    StorageError,
    StoreBusy,
    StoreUnreachable,
    UselessAnswer,
)


@pytest.mark.parametrize(
    "error",
    [
        DataError(FailureReason.ROW_TOO_LONG, "line 3"),
        Interrupted(FailureReason.INVALID_ROW, "it was killed"),
        StorageError(FailureReason.INVALID_SPEC, "a bucket's name"),
        ObjectNotFound(FailureReason.DATASET_NOT_FOUND, "none"),
        AccessRefused("no"),
        StoreUnreachable("away"),
        StoreBusy("until noon", 200.0),
        UselessAnswer("no commit"),
        OSError(errno.ENOSPC, "the disk is full"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_rank_has_the_same_error_as_if_it_had_been_raised_there(error: Exception) -> None:
    crossed = Failed.model_validate_json(failed_message(error).to_json())
    arrived = error_of(crossed, "too much memory")
    assert type(arrived) is type(error)
    assert reason_of(arrived) == reason_of(error)
    assert is_the_machines(arrived) == is_the_machines(error)
    assert getattr(arrived, "seconds", None) == getattr(error, "seconds", None)


def test_memory_that_a_job_may_not_have_is_its_own_want() -> None:
    arrived = error_of(failed_message(MemoryError()), "too much memory")
    assert reason_of(arrived) == (FailureReason.OUT_OF_MEMORY, "too much memory")
    assert not is_the_machines(arrived)


def test_what_nobody_foresaw_is_an_internal_error_in_its_own_words() -> None:
    arrived = error_of(failed_message(ValueError("half a character: \ud800")), "")
    assert reason_of(arrived) == (
        FailureReason.INTERNAL_ERROR,
        "ValueError: half a character: \\ud800",
    )
