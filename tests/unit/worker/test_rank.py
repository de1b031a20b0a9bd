"""What rank 0 hears from the others before and after it serves."""

from __future__ import annotations

from pathlib import Path

import torch

from mlora_worker.protocol import ModelSource, WorkerConfig
from mlora_worker.rank import _FirstRank


def test_a_rank_that_is_asked_to_end_while_rank_0_loads_its_model_ends_the_group_at_once(
    tmp_path: Path,
) -> None:
    """It was passed over: tasks then trained until that rank's time was over, and lost their steps."""
    config = WorkerConfig(
        pipeline="n/p", model=ModelSource(name="m", uri="file:///m"), stages=2, coordinator_host="h",
        token_file=str(tmp_path / "token"),
    )  # fmt: skip
    left: list[Exception] = []
    first = _FirstRank(config, torch.device("cpu"), "token", left.append)
    first._heard(1, {"kind": "terminating"}, b"")
    assert [str(error) for error in left] == ["rank 1 was asked to stop"]
