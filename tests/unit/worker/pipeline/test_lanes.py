"""Results are read late, in order, and never by the thread that computes; on a device whose moments the test lets pass."""

from __future__ import annotations

import queue
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from mlora_worker.pipeline.lanes import Cpu, LateReader, Moment


@dataclass
class SlowDevice:
    """Each mark is a moment that passes when ``let_pass`` is called once more."""

    moments: list[threading.Event] = field(default_factory=list)
    readers: set[str] = field(default_factory=set)

    def mark(self) -> Moment:
        self.moments.append(threading.Event())
        return self.moments[-1]

    def lane(self) -> SlowDevice:
        return self

    def behind(self, ready: Moment) -> AbstractContextManager[None]:
        del ready
        return nullcontext()

    def reach(self, ready: Moment) -> None:
        assert ready.wait(5)

    def to_host(self, tensor: Tensor, ready: Moment) -> Tensor:
        self.readers.add(threading.current_thread().name)
        assert ready.wait(5)
        return tensor.clone()

    def hand_over(self, tensor: Tensor) -> Tensor:
        return tensor


def test_on_the_cpu_results_are_delivered_at_once_by_the_same_thread() -> None:
    seen: list[tuple[int, float, str]] = []
    reader = LateReader(
        Cpu(),
        lambda number, values: seen.append((number, values.item(), threading.current_thread().name)),
        pytest.fail,
    )
    reader.read(1, torch.tensor(2.0))
    assert seen == [(1, 2.0, threading.current_thread().name)]


def test_results_of_a_device_come_when_it_is_done_and_the_computing_thread_never_waits() -> None:
    device, seen = SlowDevice(), queue.Queue[tuple[int, float]]()
    reader = LateReader(device, lambda number, values: seen.put((number, values.item())), pytest.fail)
    for number in (1, 2):
        reader.read(number, torch.tensor(float(number)))
    assert seen.empty()
    device.moments[1].set()
    with pytest.raises(queue.Empty):
        seen.get(timeout=0.05)  # in their order
    device.moments[0].set()
    assert [seen.get(timeout=5), seen.get(timeout=5)] == [(1, 1.0), (2, 2.0)]
    assert device.readers == {"late-reader"}


def test_an_error_of_the_reader_ends_the_loop() -> None:
    device, errors = SlowDevice(), queue.Queue[Exception]()

    def deliver(*_: object) -> None:
        raise ValueError("unexpected stats")

    LateReader(device, deliver, errors.put).read(1, torch.zeros(1))
    device.moments[0].set()
    assert "unexpected stats" in str(errors.get(timeout=5))
