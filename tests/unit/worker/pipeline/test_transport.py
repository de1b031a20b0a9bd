"""What arrives finds memory, if it only waits a moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mlora_worker.pipeline.transport import patiently


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
