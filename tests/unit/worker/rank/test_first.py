"""Rank 0: what it hears from the others before it serves, and what it keeps in its memory."""

from __future__ import annotations

import pytest
import torch

from mlora_worker.coordinator.uploads.checkpoints import KEPT_BYTES
from mlora_worker.protocol import ModelSource, WorkerConfig
from mlora_worker.rank.first import FirstRank
from mlora_worker.rank.stores import kept_bytes


def configuration(memory_budget: int | None = None) -> WorkerConfig:
    return WorkerConfig(
        pipeline="n/p", model=ModelSource(name="m", uri="file:///m"), stages=2, coordinator_host="h",
        token_file="token", memory_budget=memory_budget,
    )  # fmt: skip


def test_a_rank_that_is_asked_to_end_while_rank_0_loads_its_model_ends_the_group_at_once() -> None:
    """It was passed over: tasks then trained until that rank's time was over, and lost their steps."""
    left: list[Exception] = []
    first = FirstRank(configuration(), torch.device("cpu"), "token", left.append)
    first._heard(1, {"kind": "terminating"}, b"")
    assert [str(error) for error in left] == ["rank 1 was asked to stop"]


@pytest.mark.parametrize(
    ("device", "budget", "kept"),
    [("cpu", 2**32, 0), ("cpu", None, KEPT_BYTES), ("cuda", 2**32, KEPT_BYTES)],
)
def test_what_waits_for_its_return_takes_nothing_of_a_budget_that_all_memory_is_of(
    device: str, budget: int | None, kept: int
) -> None:
    assert kept_bytes(configuration(budget), torch.device(device)) == kept
