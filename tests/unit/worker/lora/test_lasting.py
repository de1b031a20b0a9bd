"""What a task holds while it trains lies apart from the heap, and goes back whole."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from mlora_worker.lora.adapter import Adapter
from mlora_worker.lora.lasting import lasting_zeros
from mlora_worker.lora.optimizer import TaskOptimizer
from mlora_worker.pipeline.faults import is_out_of_memory
from mlora_worker.protocol import Training

CPU = torch.device("cpu")


@pytest.mark.parametrize("elements", [1, 2**10, 2**20])
def test_they_are_zeros_that_may_be_written(elements: int) -> None:
    made = lasting_zeros(elements, CPU)
    assert (made.dtype, made.shape, float(made.abs().sum())) == (torch.float32, (elements,), 0.0)
    made += 1
    assert float(made.sum()) == elements


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells")
def test_an_adapter_and_its_moments_lie_apart_and_go_back_when_it_ends() -> None:
    def mapped() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024

    def loaded() -> tuple[Adapter, TaskOptimizer]:
        shapes = {"layers.0.q_proj": (1024, 1024)}
        adapter = Adapter([shapes], rank=1024, seed=1, dtype=torch.float32, device=CPU)
        return adapter, TaskOptimizer(adapter, Training(max_steps=1))

    loaded()  # what the first one needs once
    before = mapped()
    held = loaded()
    size = held[0].bytes + held[1].bytes
    assert size == 4 * 4 * 2 * 2**20
    assert mapped() - before >= size
    del held
    assert mapped() - before < size // 4  # the heap keeps what A was drawn in


def test_want_of_memory_is_told_as_such() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (2**30, hard))
    try:
        with pytest.raises(MemoryError, match="a task holds") as caught:
            lasting_zeros(2**32, CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert is_out_of_memory(caught.value)
