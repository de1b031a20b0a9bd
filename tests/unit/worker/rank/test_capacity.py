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


def test_of_a_cpu_no_more_than_the_machine_has() -> None:
    assert 0 < capacity_bytes(torch.device("cpu")) < 2**60
