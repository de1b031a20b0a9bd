"""When weights may be packed: a rule of the configuration alone."""

from __future__ import annotations

import pytest

from mlora_worker.stream.packing import may_pack

MIB = 2**20


@pytest.mark.parametrize(
    ("parameters", "packed", "budget", "may"),
    [
        (135 * MIB, 1200 * MIB, None, True),
        (135 * MIB, 1200 * MIB, 3000 * MIB, True),
        (135 * MIB, 1201 * MIB, 3000 * MIB, False),  # a tight budget is for the tasks
        (MIB - 1, 8 * MIB, None, False),  # nothing to be won
    ],
)
def test_it_follows_from_the_bytes_and_the_budget(
    parameters: int, packed: int, budget: int | None, may: bool
) -> None:
    assert may_pack(parameters, packed, budget) is may
