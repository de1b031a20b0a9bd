"""When a stage may take another library: a rule of the configuration alone."""

from __future__ import annotations

import pytest

from mlora_worker.stream.libraries import KERNEL_BYTES, may_choose

MIB = 2**20


@pytest.mark.parametrize(
    ("parameters", "budget", "may"),
    [
        (135 * MIB, None, True),
        (135 * MIB, 10 * KERNEL_BYTES, True),
        (135 * MIB, 9 * KERNEL_BYTES, False),  # a tight budget is for the tasks
        (16 * MIB - 1, None, False),  # nothing to be won
    ],
)
def test_it_follows_from_the_weights_and_the_budget(parameters: int, budget: int | None, may: bool) -> None:
    assert may_choose(parameters, budget) is may
