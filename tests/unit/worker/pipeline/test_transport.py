"""What arrives finds memory, if it only waits a moment; a tensor is asked for when it is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from mlora_worker.pipeline.lanes import Cpu, Moment
from mlora_worker.pipeline.transport import Line, Wire, patiently


def failing(times: int, error: Exception) -> Callable[[], Tensor]:
    left = [error] * times

    def allocate() -> Tensor:
        if left:
            raise left.pop()
        return torch.zeros(1)

    return allocate


def test_memory_that_comes_back_is_waited_for() -> None:
    pauses: list[float] = []
    assert patiently(failing(3, torch.OutOfMemoryError("out of memory")), pauses.append).shape == (1,)
    assert pauses == [0.1] * 3


@pytest.mark.parametrize(
    ("story", "error", "tries"),
    [
        ("memory that never comes back", MemoryError("no memory"), 300),
        ("another error is not waited out", ValueError("odd"), 0),
    ],
)
def test_there_is_an_end_to_it(story: str, error: Exception, tries: int) -> None:
    pauses: list[float] = []
    with pytest.raises(type(error)):
        patiently(failing(1000, error), pauses.append)
    assert len(pauses) == tries, story


CPU = torch.device("cpu")


class Told(Wire):
    """Writes down what it is asked for."""

    def __init__(self, name: str, told: list[str]) -> None:
        object.__setattr__(self, "group", (name, told))

    def send(self, tensors: Sequence[Tensor], peer: int) -> None:
        self.group[1].append(f"{len(tensors)} {self.group[0]} to {peer}")

    def receive(self, buffers: Sequence[Tensor], peer: int) -> None:
        self.group[1].append(f"{len(buffers)} {self.group[0]} from {peer}")


class ToldLane(Cpu):
    def __init__(self, told: list[str]) -> None:
        self.told = told

    def reach(self, ready: Moment) -> None:
        self.told.append(f"reached {ready}")


GRADIENT_AND_STATS = (((2, 3), torch.float32), ((1, 4), torch.float64))


@pytest.mark.parametrize("staged", [True, False])
def test_a_byte_says_that_a_message_is_computed_before_anyone_occupies_a_device_for_it(staged: bool) -> None:
    told: list[str] = []
    line = Line(Told("tensor", told), Told("byte", told), ToldLane(told), CPU, staged=staged)
    line.send((torch.zeros(2), torch.zeros(3)), 1, "the end of backward")
    assert told == ["reached the end of backward", "1 byte to 1", "2 tensor to 1"]
    told.clear()
    assert [one.shape for one in line.receive(GRADIENT_AND_STATS, 0)] == [(2, 3), (1, 4)]
    assert told == ["1 byte from 0", "2 tensor from 0"]


def test_without_need_no_byte_travels() -> None:
    told: list[str] = []
    line = Line(Told("tensor", told), None, ToldLane(told), CPU, staged=True)
    line.send((torch.zeros(2),), 1, None)
    line.receive(GRADIENT_AND_STATS[:1], 1)
    assert told == ["1 tensor to 1", "1 tensor from 1"]
