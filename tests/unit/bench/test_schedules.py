"""The schedules of torch.distributed.pipelining compute what this project computes; on one rank, without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from bench.base import transformers_model, whole_stage
from bench.ours import Ours
from bench.peers.schedules import KINDS, ScheduledTasks
from bench.rows import deal
from bench.sides import Setting, check_losses
from mlora_worker.data.prepare import TokenRow

TASKS, BATCH, STEPS = 2, 2, 3


@pytest.fixture
def _group_of_one() -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group_of_one")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_schedules_losses_equal_ours_step_by_step(
    tiny_model: Path, make_rows: Callable[[int], list[TokenRow]], kind: str, microbatches: int
) -> None:
    setting = Setting(TASKS, ("q_proj", "v_proj"), dropout=0.0)
    ours = Ours(whole_stage(tiny_model, torch.float32), setting)
    peer = ScheduledTasks(
        transformers_model(tiny_model, torch.float32), setting, [range(4)], rank=0, microbatches=microbatches
    )
    peer.restore(ours.adapters())
    rows = make_rows(TASKS * BATCH * STEPS)
    for step in range(STEPS):
        batch = deal(rows, TASKS, BATCH, step)
        check_losses(
            {
                "ours": ours.step(batch, 1e-2),
                kind: [peer.step(kind, task, batch.rows[task], 1e-2) for task in range(TASKS)],
            },
            1e-4,
        )
