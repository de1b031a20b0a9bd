"""A store in memory for s3:// addresses, that keeps a journal and can be made to fail; a task to publish for."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from mlora_worker.protocol import Dataset, FailureReason, LoRAConfig, StorageAccess, TaskPlan, Training
from mlora_worker.storage.errors import StorageError
from tests.fixtures.memory_store import MemoryStore


class JournaledStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__(self._change)
        self.journal: list[tuple[str, str]] = []  # (what was done, file name)
        self.ranges: list[tuple[str, int, int]] = []
        self.writes_left: int | None = None  # after so many writes and deletes, the store is gone

    def read_range(self, uri: str, start: int, length: int) -> bytes:
        self.ranges.append((uri, start, length))
        return super().read_range(uri, start, length)

    def _change(self, action: str, uri: str) -> None:
        if action not in ("write", "delete"):
            return
        if self.writes_left is not None:
            if self.writes_left == 0:
                raise StorageError(FailureReason.STORAGE_UNREACHABLE, "gone")
            self.writes_left -= 1
        self.journal.append((action, uri.rpartition("/")[2]))


@pytest.fixture
def memory() -> JournaledStore:
    return JournaledStore()


@pytest.fixture
def task() -> TaskPlan:
    return TaskPlan(
        uid="uid-1",
        namespace="team-a",
        name="support-bot",
        base_model="acme/tiny",
        lora=LoRAConfig(rank=4, alpha=8, dropout=0.1, target_modules=("q_proj", "v_proj")),
        dataset=Dataset(uri="s3://data/rows.jsonl"),
        training=Training(),
        output_uri="s3://adapters/team-a/support-bot",
        storage=StorageAccess(access_key=SecretStr("AKIDKEY"), secret_key=SecretStr("topsecret")),
    )
