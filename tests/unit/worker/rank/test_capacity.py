"""What a stage may take of its device's memory."""

from __future__ import annotations

import pytest
import torch

from mlora_worker.rank.base_model import capacity_bytes

GIB = 2**30


def test_of_a_gpu_what_torch_holds_and_what_nobody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GiB other things than torch's allocator hold 3: contexts, channels, other processes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 17 * GIB)
    assert capacity_bytes(torch.device("cuda")) == 77 * GIB


def test_starts_at_which_contexts_take_a_little_more_tell_of_the_same_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    told = set()
    for more in (3, 5, 11):
        free = 60 * GIB - more * 2**20
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 80 * GIB))
        told.add(capacity_bytes(torch.device("cuda")))
    assert told == {60 * GIB - 64 * 2**20}


def test_of_a_cpu_no_more_than_the_machine_has() -> None:
    assert 0 < capacity_bytes(torch.device("cpu")) < 2**60
