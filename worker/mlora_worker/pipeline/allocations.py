"""Bytes that computing takes, counted at torch's allocator: exact, not sampled.

A *ledger* follows one microbatch through its forward and its backward and knows at any time how many bytes of it are
there. On CUDA the allocator keeps the count itself (``torch.cuda.memory_stats``). On the CPU torch tells its profiler of
each block that it gives and takes back on the computing thread, and the ledger adds them up: blocks inside an operator
are seen, and so are buffers that compiled kernels write to, since torch allocated them. What is not seen: scratch memory
of the matrix libraries, Python's own objects, and what the C library keeps for itself. RSS has all of that, but never
shrinks while freed memory is kept for the next step (``allocator.py``), so it tells the largest microbatch so far and not
the present one.

Following one costs: on the CPU torch notes every operator, some tens of milliseconds. So a few microbatches are measured,
not all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd as native
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    _EventType,
    _ExperimentalConfig,
)

from mlora_worker.frozen.quantised import UNPACKING

_ACTIVITIES = {ProfilerActivity.CPU}
_ONE_AT_A_TIME = threading.Lock()  # torch has one profiler in a process


class Ledger:
    """Of one microbatch."""

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        self.held = 0  # bytes of it that are there now
        self.complete = True  # False when a phase could not be followed: the figures say nothing then
        self.in_use: int | None = (
            None  # most bytes of all that the process has; None: the allocator does not tell
        )

    def follow(self, phase: str) -> AbstractContextManager[None]:
        """A context; ``peak(phase)`` tells afterwards the most bytes that were there at once in it."""
        raise NotImplementedError

    def peak(self, phase: str) -> int:
        return self._peaks[phase]


def ledger_for(device: torch.device) -> Ledger:
    return CudaLedger(device) if device.type == "cuda" else CpuLedger()


class CpuLedger(Ledger):
    """Blocks of torch's CPU allocator, by their address. Not thread-safe; all phases on one thread."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, int] = {}

    @contextmanager
    def follow(self, phase: str) -> Iterator[None]:
        if not _ONE_AT_A_TIME.acquire(blocking=False):
            self.complete = False
            yield
            return
        result = None
        try:
            native._prepare_profiler(_config(), _ACTIVITIES)
            native._enable_profiler(_config(), _ACTIVITIES)
            try:
                yield
            finally:
                result = native._disable_profiler()
        finally:
            _ONE_AT_A_TIME.release()
        self._peaks[phase] = self._add(_blocks(result))

    def _add(self, changes: list[tuple[int, int]]) -> int:
        """Settle ``changes`` (address, bytes; negative where they went back) and give the most that was held."""
        most = self.held
        for address, size in changes:
            if size > 0:
                self._blocks[address] = size
                self.held += size
                most = max(most, self.held)
            else:  # blocks of others, which this microbatch happened to let go, are not in the ledger
                self.held -= self._blocks.pop(address, 0)
        return most


class CudaLedger(Ledger):
    """Torch's CUDA allocator, whose counts are those of the queueing thread: nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @contextmanager
    def follow(self, phase: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield
        most = torch.cuda.max_memory_allocated(self._device)
        self.in_use = max(self.in_use or 0, most)
        self._peaks[phase] = self.held + max(0, most - before)
        self.held = max(0, self.held + torch.cuda.memory_allocated(self._device) - before)


def resident_set_bytes() -> int:
    """Of this process, as the kernel counts it; 0 where it does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def bytes_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


def _config() -> ProfilerConfig:
    """Memory alone: no shapes, no stacks, no modules."""
    return ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())


def _blocks(result: Any) -> list[tuple[int, int]]:
    """Address and bytes of each block that was given (positive) or taken back (negative), in the order of time. Without
    those for dense matrices, which are counted by themselves."""
    found: list[tuple[int, int, int]] = []
    waiting = list(result.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        if event.name == UNPACKING:
            continue
        waiting.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    found.sort(key=lambda one: one[0])
    return [(address, size) for _, address, size in found]
