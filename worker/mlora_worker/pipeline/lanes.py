"""Copies and messages beside the computing: what runs on which queue of the device, and who waits for what.

The thread that computes only *queues* work on a GPU and runs ahead of it. It marks a moment in its queue, and goes on. A
thread that sends, receives or reads has a *lane*, a queue of its own: the lane's work starts after the moment, and this
thread alone waits for it. On the CPU work is done when the call returns: there are no moments, and lanes do nothing.

Tests put a device of their own in the place of ``Device``, whose moments pass when the test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor

Moment = Any  # of the device's own kind; None: already passed


class Lane(Protocol):
    """One thread's queue."""

    def behind(self, ready: Moment) -> AbstractContextManager[None]:
        """What is queued in the block starts after ``ready`` and is done when the block ends."""
        ...

    def reach(self, ready: Moment) -> None:
        """Block this thread until ``ready`` has passed."""
        ...

    def to_host(self, tensor: Tensor, ready: Moment) -> Tensor:
        """``tensor``, which is computed by ``ready``, in the host's memory, whole. Blocks this thread."""
        ...

    def hand_over(self, tensor: Tensor) -> Tensor:
        """``tensor``, from the host or made on this lane, on the device for the computing thread to use and to free."""
        ...


class Device(Protocol):
    """Where this rank computes."""

    def mark(self) -> Moment:
        """The moment when all that the calling thread has queued so far is done."""
        ...

    def lane(self) -> Lane: ...


class Cpu:
    """Work is done when it is queued."""

    def mark(self) -> Moment:
        return None

    def lane(self) -> Lane:
        return self

    def behind(self, ready: Moment) -> AbstractContextManager[None]:
        del ready
        return nullcontext()

    def reach(self, ready: Moment) -> None:
        del ready

    def to_host(self, tensor: Tensor, ready: Moment) -> Tensor:
        del ready
        return tensor

    def hand_over(self, tensor: Tensor) -> Tensor:
        return tensor


class Gpu:
    """A CUDA device; the computing thread uses its default stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Moment:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def lane(self) -> Lane:
        return _GpuLane(self._device)


class _GpuLane:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def behind(self, ready: Moment) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            yield
        self._stream.synchronize()

    def reach(self, ready: Moment) -> None:
        with self.behind(ready):
            pass

    def to_host(self, tensor: Tensor, ready: Moment) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with self.behind(ready):
            host.copy_(tensor, non_blocking=True)
        return host

    def hand_over(self, tensor: Tensor) -> Tensor:
        with self.behind(None):
            there = tensor.to(self._device, non_blocking=True)
        # Its memory belongs to this lane: it may be used again only when the computing queue is through with it.
        there.record_stream(torch.cuda.default_stream(self._device))
        return there


def device_of(device: torch.device) -> Device:
    return Gpu(device) if device.type == "cuda" else Cpu()


class LateReader:
    """Reads small results on the host once the device has them, in their order, and never stops who computes."""

    def __init__(
        self, device: Device, deliver: Callable[[int, Tensor], None], on_error: Callable[[Exception], None]
    ) -> None:
        self._device, self._deliver, self._on_error = device, deliver, on_error
        self._waiting: SimpleQueue[tuple[int, Tensor, Moment]] = SimpleQueue()
        self._started = False

    def read(self, number: int, values: Tensor) -> None:
        """Deliver ``values`` of microbatch ``number``: now if they are here, else from a thread that waits for them."""
        ready = self._device.mark()
        if ready is None:
            self._deliver(number, values)
            return
        if not self._started:
            self._started = True
            Thread(target=self._work, name="late-reader", daemon=True).start()
        self._waiting.put((number, values, ready))

    def _work(self) -> None:
        try:
            lane = self._device.lane()
            while True:
                number, values, ready = self._waiting.get()
                self._deliver(number, lane.to_host(values, ready))
        except Exception as error:  # the device broke, or the coordinator: the loop must not wait for ever
            self._on_error(error)
