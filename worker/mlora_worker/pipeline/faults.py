"""Faults: errors while computing that end a task or a microbatch, and not the rank.

A rank survives what it can leave behind: an exception in the computing of a microbatch, memory that runs out, an adapter
that cannot be made, updated or exported. It does not survive

1. a broken stream or link (``OutOfOrder``, ``LinkClosed``): the ranks no longer agree on what is in flight;
2. a device that answers every further call with the same error, such as an illegal memory access
   (``torch.AcceleratorError``, or ``recover`` that fails): nothing more can be computed on it.

Then the group is over and starts again. docs/contributors/isolation.md has the whole protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import torch

from mlora_worker.pipeline.frames import LinkClosed
from mlora_worker.pipeline.results import OutOfOrder
from mlora_worker.protocol import Message

_LONGEST = 600  # characters of an error's text that travel
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, the one code after which a device still works
# What allocators without an exception of their own say: torch's on the CPU, cuBLAS.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


class Phase(StrEnum):
    """What was being done."""

    LOAD = "load"
    UPDATE = "update"
    FORWARD = "forward"
    BACKWARD = "backward"
    CHECKPOINT = "checkpoint"
    SAVE = "save"
    EVALUATE = "evaluate"
    KEEP = "keep"


class Fault(Message):
    """Travels on the link to rank 0, so with text; the stats of the microbatch say only how many there are."""

    stage: int
    number: int  # of the item
    phase: Phase
    task: str | None = None  # whose fault it is; None: the computing of a whole microbatch failed
    out_of_memory: bool = False
    error: str  # type and message of the exception, never a row's text

    @property
    def kind(self) -> tuple[int, Phase, str]:
        """Equal for faults that have the same cause, as far as can be told: where, when, and the exception's type."""
        return self.stage, self.phase, self.error.partition(":")[0]


OnFault = Callable[[Fault], None]


def is_fatal(error: Exception) -> bool:
    """The rank must end."""
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) != _CUDA_OUT_OF_MEMORY
    return isinstance(error, OutOfOrder | LinkClosed)


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def fault_of(error: Exception, *, stage: int, number: int, phase: Phase, task: str | None) -> Fault:
    """``error`` must not be fatal."""
    text = str(error).strip().partition("\n")[0][:_LONGEST]
    return Fault(
        stage=stage,
        number=number,
        phase=phase,
        task=task,
        out_of_memory=is_out_of_memory(error),
        error=f"{type(error).__name__}: {text}" if text else type(error).__name__,
    )


def recover(device: torch.device) -> None:
    """Prove that ``device`` still works, and give back the memory that the fault has freed. Raises what the device says."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
        torch.cuda.empty_cache()
