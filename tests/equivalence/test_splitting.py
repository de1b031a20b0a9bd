"""Neither the number of stages nor that of microbatches changes what is trained, nor what the file is called inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mlora_worker.coordinator.preparation.expected_tensors import expected_tensors
from mlora_worker.model.architecture import read_architecture
from mlora_worker.model.facts import facts_of, resolve_targets
from mlora_worker.protocol import LoRAConfig, Schedule, Training
from mlora_worker.storage.artifacts.adapter import check_adapter
from tests.equivalence.tasks import Base, Row, Task, Trained, assert_same, train

STEPS = 12
ROWS_A_STEP, TOKENS_A_ROW = 8, 20  # of equal length, so that a token budget is a number of microbatches
TRAINING = Training(
    batch_size=ROWS_A_STEP,
    learning_rate=2e-3,
    schedule=Schedule.COSINE,
    warmup_steps=3,
    max_grad_norm=0.5,
    weight_decay=0.01,
    seed=11,
)


def subject(rows: Callable[..., list[Row]]) -> Task:
    lora = LoRAConfig(
        rank=8, alpha=16, dropout=0.1, target_modules=("q_proj", "v_proj", "up_proj", "down_proj")
    )
    return Task("subject", lora, TRAINING, rows(40, 1, TOKENS_A_ROW, TOKENS_A_ROW), STEPS)


@pytest.fixture(scope="module")
def whole(base: Base, rows: Callable[..., list[Row]]) -> Trained:
    """One stage, each step one microbatch."""
    trained = train(base, 1, [subject(rows)])["subject"]
    assert set(trained.microbatches) == {1}
    return trained


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (1, 4), (2, 2), (3, 4)])
def test_stages_and_microbatches_change_nothing(
    base: Base, rows: Callable[..., list[Row]], whole: Trained, stages: int, microbatches: int
) -> None:
    budget = ROWS_A_STEP * TOKENS_A_ROW // microbatches
    trained = train(base, stages, [subject(rows)], budget=budget)["subject"]
    assert min(trained.microbatches) >= microbatches
    if stages == 1:
        assert set(trained.microbatches) == {microbatches}
    assert_same(trained, whole, losses=1e-6, weights=1e-5)


def test_the_file_is_the_same_byte_for_byte_whichever_stages_the_layers_were_on(
    base: Base, rows: Callable[..., list[Row]], tmp_path: Path
) -> None:
    """A step of one row is one microbatch on any number of stages, and then even the rounding is the same."""
    lora = LoRAConfig(rank=8, alpha=16, dropout=0.1, target_modules=("q_proj", "v_proj", "down_proj"))
    training = TRAINING.model_copy(update={"batch_size": 1})
    task = Task("subject", lora, training, rows(6, 1, TOKENS_A_ROW, TOKENS_A_ROW), 6)
    facts = facts_of(read_architecture(base.folder), 1, torch.float32)
    expected = expected_tensors(resolve_targets(facts, lora))
    files = []
    for stages in (1, 2, 3):  # of three layers: two stages are uneven
        adapter = train(base, stages, [task])["subject"].adapter
        check_adapter(adapter, expected)
        assert len(adapter) == 3 * len(lora.target_modules) * 2
        files.append(tmp_path / f"{stages}.safetensors")
        save_file(adapter, files[-1])
    assert len({file.read_bytes() for file in files}) == 1
