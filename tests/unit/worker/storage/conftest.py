"""A store in memory for s3:// addresses, that keeps a journal and can be made to fail; a task to publish for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from mlora_worker.protocol import Dataset, FailureReason, LoRAConfig, StorageAccess, TaskPlan, Training
from mlora_worker.storage.errors import ObjectNotFound, StorageError
from mlora_worker.storage.lines import split_lines


class MemoryStore:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.journal: list[tuple[str, str]] = []  # (what was done, file name)
        self.ranges: list[tuple[str, int, int]] = []
        self.writes_left: int | None = None  # after so many writes and deletes, the store is gone

    def read(self, uri: str) -> bytes:
        if uri not in self.objects:
            raise ObjectNotFound(FailureReason.DATASET_NOT_FOUND, f"{uri} does not exist")
        return self.objects[uri]

    def read_range(self, uri: str, start: int, length: int) -> bytes:
        self.ranges.append((uri, start, length))
        return self.read(uri)[start : start + length]

    def open_lines(self, uri: str) -> Iterator[bytes]:
        return split_lines([self.read(uri)])

    def size(self, uri: str) -> int:
        return len(self.read(uri))

    def exists(self, uri: str) -> bool:
        return uri in self.objects

    def write(self, uri: str, data: bytes) -> None:
        self._change("write", uri)
        self.objects[uri] = data

    def write_file(self, uri: str, path: Path) -> None:
        self.write(uri, path.read_bytes())

    def delete(self, uri: str) -> None:
        self._change("delete", uri)
        self.objects.pop(uri, None)

    def list(self, prefix: str) -> list[str]:
        return sorted(uri for uri in self.objects if uri.startswith(prefix.rstrip("/") + "/"))

    def _change(self, action: str, uri: str) -> None:
        if self.writes_left is not None:
            if self.writes_left == 0:
                raise StorageError(FailureReason.STORAGE_UNREACHABLE, "gone")
            self.writes_left -= 1
        self.journal.append((action, uri.rpartition("/")[2]))


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


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
