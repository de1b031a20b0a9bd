from __future__ import annotations

from typing import Any

import pytest

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.artifacts.write_probe import PROBE_NAME, probe_output
from mlora_worker.storage.errors import StorageError


def test_a_probe_puts_looks_and_deletes(memory: Any) -> None:
    probe_output(memory, "s3://adapters/x/")
    assert memory.journal == [("write", PROBE_NAME), ("delete", PROBE_NAME)]
    assert memory.objects == {}


@pytest.mark.parametrize("writes", [0, 1])
def test_a_store_that_refuses_the_write_or_the_delete_is_found_out(memory: Any, writes: int) -> None:
    memory.writes_left = writes
    with pytest.raises(StorageError, match="gone"):
        probe_output(memory, "s3://adapters/x")


def test_a_store_that_loses_what_was_written_is_found_out(memory: Any) -> None:
    memory.write_kept = memory.write
    memory.write = lambda uri, data: memory.write_kept(uri, data[:-1])
    with pytest.raises(StorageError, match="are not reliable") as caught:
        probe_output(memory, "s3://adapters/x")
    assert caught.value.reason is FailureReason.UPLOAD_FAILED
