"""What a job may take of the machine; tests/integration/preparing has processes that take more."""

from __future__ import annotations

import pytest

from mlora_worker.preparing import bounds

MIB = 2**20


@pytest.mark.parametrize(
    ("limit", "one", "all_together"),
    [(None, 1024, 2048), (64 * 1024 * MIB, 1024, 2048), (4096 * MIB, 1024, 1024), (512 * MIB, 384, 384)],
)
def test_a_container_with_little_memory_grants_less(limit: int | None, one: int, all_together: int) -> None:
    assert bounds.most_of_one(limit) == one * MIB
    assert bounds.most_of_all(limit) == all_together * MIB
