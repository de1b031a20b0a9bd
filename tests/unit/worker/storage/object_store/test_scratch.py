"""Files on their way to a store: a killed writer's go at the next start, a living one's stay."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.object_store.scratch import remove_abandoned, save_tensors, scratch_folder


def test_a_killed_writers_folder_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with scratch_folder(tmp_path, "adapter") as folder:
            (folder / "weights").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    with scratch_folder(tmp_path, "adapter") as living:
        (living / "weights").write_bytes(b"whole")
        remove_abandoned(tmp_path)
        assert list(tmp_path.iterdir()) == [living]
        assert (living / "weights").exists()
    assert not left.exists()
    assert list(tmp_path.iterdir()) == []


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "adapter-1").mkdir()
    (tmp_path / "adapter-1" / ".lock").touch()
    remove_abandoned(tmp_path)
    assert (tmp_path / "adapter-1").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=f"written to {tmp_path}/none .* more scratch space") as caught,
        scratch_folder(tmp_path / "none", "adapter"),
    ):
        pass
    assert caught.value.reason is FailureReason.UPLOAD_FAILED


def test_a_file_that_may_not_become_so_large_is_want_of_space(tmp_path: Path) -> None:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, usual[1]))
    try:
        with pytest.raises(StorageError, match="more scratch space") as caught:
            save_tensors({"x": torch.ones(4096)}, tmp_path / "x", "adapter")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert caught.value.reason is FailureReason.INSUFFICIENT_SPACE


def test_what_is_saved_is_a_file_of_the_tensors(tmp_path: Path) -> None:
    path = save_tensors({"x": torch.ones(3)}, tmp_path / "x", "adapter")
    assert path.stat().st_size > 12
