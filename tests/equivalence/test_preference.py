"""Preference training equals TRL's own trainers, beside any neighbours, on any number of stages, after any interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlora_worker.protocol import LoRAConfig, Objective, Schedule, Training
from tests.equivalence.tasks import Base, Task, assert_same, random_pairs, train
from tests.equivalence.trl_trainers import train_with_trl

STEPS = 20
LORA = LoRAConfig(rank=4, alpha=8, target_modules=("q_proj", "v_proj", "down_proj"))
TRAINING = Training(
    batch_size=4, learning_rate=5e-3, schedule=Schedule.COSINE, warmup_steps=3, weight_decay=0.01, seed=11
)

OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"type": "dpo"},
    "dpo-smoothed": {"type": "dpo", "beta": 0.3, "lossType": "robust", "labelSmoothing": 0.1},
    "dpo-ipo": {"type": "dpo", "lossType": "ipo"},
    "dpo-hinge": {"type": "dpo", "lossType": "hinge", "beta": 0.5},
    "cpo": {"type": "cpo"},
    "cpo-smoothed": {"type": "cpo", "beta": 0.2, "labelSmoothing": 0.1, "cpoAlpha": 0.5},
    "cpo-ipo": {"type": "cpo", "lossType": "ipo"},
    "cpo-hinge": {"type": "cpo", "lossType": "hinge", "cpoAlpha": 0.0},
    "simpo": {"type": "simpo"},
    "simpo-smoothed": {"type": "simpo", "beta": 2.0, "simpoGamma": 1.0, "labelSmoothing": 0.1},
    "orpo": {"type": "orpo"},
}


def task(name: str, objective: dict[str, Any], seed: int = 1, **training: Any) -> Task:
    settings = TRAINING.model_copy(update={"objective": Objective.model_validate(objective), **training})
    return Task(name, LORA, settings, random_pairs(20, seed), STEPS)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_weights_are_those_of_trl(base: Base, name: str, tmp_path: Path) -> None:
    subject = task(name, OBJECTIVES[name])
    ours = train(base, 1, [subject])[name]
    theirs = train_with_trl(base, subject, ours.start, tmp_path)
    assert_same(ours, theirs, losses=1e-4, weights=1e-4)
