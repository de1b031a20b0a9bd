"""What a rank survives, and what it tells of it."""

from __future__ import annotations

import pytest
import torch

from mlora_worker.pipeline.faults import Phase, fault_of, is_fatal, is_out_of_memory
from mlora_worker.pipeline.frames import LinkClosed
from mlora_worker.pipeline.results import OutOfOrder


def accelerator_error(code: int) -> torch.AcceleratorError:
    error = torch.AcceleratorError("CUDA error")
    error.error_code = code
    return error


@pytest.mark.parametrize(
    ("story", "error", "fatal", "memory"),
    [
        ("the stream", OutOfOrder("task a is not loaded"), True, False),
        ("a peer", LinkClosed("gone"), True, False),
        ("an illegal memory access ends the device", accelerator_error(700), True, None),
        ("the device's memory", torch.OutOfMemoryError("CUDA out of memory"), False, True),
        ("the driver's", accelerator_error(2), False, True),
        ("cuBLAS's", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), False, True),
        ("Python's", MemoryError(), False, True),
        ("a bug", KeyError("x"), False, False),
        ("a shape", RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
    ],
)
def test_what_ends_a_rank_and_what_is_about_memory(
    story: str, error: Exception, fatal: bool, memory: bool | None
) -> None:
    assert is_fatal(error) is fatal, story
    if memory is not None:
        assert is_out_of_memory(error) is memory, story


def test_torchs_allocator_on_the_cpu_is_understood_by_what_it_really_says() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)


def test_a_fault_names_type_and_first_line_and_no_more_than_that() -> None:
    fault = fault_of(ValueError("odd\nstack\nof lines"), stage=2, number=7, phase=Phase.BACKWARD, task=None)
    assert (fault.stage, fault.number, fault.error) == (2, 7, "ValueError: odd")
    assert len(fault_of(ValueError("x" * 10_000), stage=0, number=1, phase=Phase.LOAD, task="a").error) < 700
    assert fault_of(MemoryError(), stage=0, number=1, phase=Phase.LOAD, task="a").error == "MemoryError"


def test_a_fault_survives_its_way_over_the_link() -> None:
    fault = fault_of(MemoryError(), stage=1, number=3, phase=Phase.SAVE, task="a")
    assert type(fault).model_validate_json(fault.to_json()) == fault
