"""A base in bfloat16: the losses follow those of PEFT's bfloat16, though the two round at other places.

PEFT computes the low-rank products of its float32 adapters in float32; here they are bfloat16, from float32 masters.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mlora_worker.protocol import LoRAConfig, Schedule, Training
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import Base, Row, Task, train

TRAINING = Training(batch_size=2, learning_rate=1e-2, schedule=Schedule.COSINE, warmup_steps=5, seed=3)


def test_the_losses_of_fifty_steps_are_within_one_percent_of_pefts(
    base: Base, rows: Callable[..., list[Row]]
) -> None:
    lora = LoRAConfig(rank=8, alpha=16, dropout=0.1, target_modules=("q_proj", "v_proj", "down_proj"))
    task = Task("t", lora, TRAINING, rows(6, 1), 50)
    ours = train(base, 1, [task], dtype=torch.bfloat16)["t"]
    theirs = train_with_peft(base, task, ours.start, dtype=torch.bfloat16)
    assert all(tensor.dtype == torch.float32 for tensor in ours.adapter.values())
    losses = [loss for loss in ours.losses if loss is not None]
    assert losses == pytest.approx(theirs.losses, rel=0.01)
    assert losses[-1] < 0.7 * losses[0], "the curve goes somewhere"
