"""A warm-up that would leave the adapter as it was is refused before the task is admitted."""

from __future__ import annotations

import json
from datetime import date

import pytest

from mlora_worker.coordinator.task.prepared import PreparedTask
from mlora_worker.data.errors import DataError
from mlora_worker.protocol import Dataset, FailureReason, Optimizer, TaskPlan, Training
from tests.fixtures.memory_store import MemoryStore
from tests.unit.worker.coordinator.test_day import TASK
from tests.unit.worker.coordinator.test_day import prepared as prepared_on


def task(row_count: int, *, started: bool = False, **training: float) -> TaskPlan:
    lines = "\n".join(json.dumps({"prompt": "a", "completion": str(number)}) for number in range(row_count))
    changes = {
        "dataset": Dataset(inline=lines),
        "training": Training(batch_size=1, **training),
        "started": started,
    }
    return TASK.model_copy(update=changes)


def prepared(task: TaskPlan) -> object:
    return prepared_on(task, MemoryStore(), date(2026, 1, 1), dated=False)


@pytest.mark.parametrize(
    ("row_count", "warmup", "words"),
    [
        (1, 100, "1 optimizer step:"),
        (1, 1, "1 optimizer step:"),
        (6, 100, "6 optimizer steps:"),
        (6, 7, "to 0,"),
    ],
)
def test_one_that_is_longer_than_the_training_is_refused(row_count: int, warmup: int, words: str) -> None:
    with pytest.raises(DataError, match=words) as refused:
        prepared(task(row_count, warmup_steps=warmup))
    assert refused.value.reason is FailureReason.INVALID_SPEC
    assert f"training.warmupSteps is {warmup}" in str(refused.value)


def test_a_fraction_of_the_only_step_is_refused_by_its_name() -> None:
    with pytest.raises(
        DataError, match=r"training.warmupRatio is 0.1, .* 1 optimizer step:.* Remove warmupRatio"
    ):
        prepared(task(1, warmup_ratio=0.1))


def test_a_checkpoint_of_a_worker_that_knew_no_fraction_is_known() -> None:
    plain, fraction = prepared(task(6)), prepared(task(6, warmup_ratio=0.5))
    assert isinstance(plain, PreparedTask)
    assert isinstance(fraction, PreparedTask)
    assert "training.warmupRatio" not in plain.fingerprint
    assert fraction.fingerprint["training.warmupRatio"] == 0.5


def test_a_checkpoint_is_of_the_numbers_of_its_optimizer() -> None:
    """Spelt out or left out, the usual ones are the same."""
    usual, spelt, other = (
        prepared(task(6).model_copy(update={"training": Training(batch_size=1, optimizer=numbers)}))
        for numbers in (None, Optimizer(), Optimizer(beta2=0.95))
    )
    assert isinstance(usual, PreparedTask)
    assert isinstance(spelt, PreparedTask)
    assert isinstance(other, PreparedTask)
    assert usual.fingerprint == spelt.fingerprint
    assert dict(other.fingerprint) == {**usual.fingerprint, "training.optimizer.beta2": 0.95} | {
        "dataset.sha256": other.fingerprint["dataset.sha256"]
    }


@pytest.mark.parametrize(("row_count", "warmup"), [(1, 0), (2, 1), (6, 6)])
def test_one_that_ends_in_time_is_taken(row_count: int, warmup: int) -> None:
    assert isinstance(prepared(task(row_count, warmup_steps=warmup)), PreparedTask)


def test_a_task_that_has_trained_before_goes_on_as_it_is() -> None:
    assert isinstance(prepared(task(1, warmup_steps=100, started=True)), PreparedTask)
