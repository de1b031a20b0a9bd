"""What a store refuses is tried again for as long as the task is wanted, and its report says why."""

from __future__ import annotations

import threading
from itertools import islice

import pytest

from mlora_worker.coordinator.patience import Withdrawn, pauses, until_stored
from mlora_worker.coordinator.tasks import TaskRun
from mlora_worker.protocol import (
    Dataset,
    FailureReason,
    LoRAConfig,
    StorageAccess,
    TaskPhase,
    TaskPlan,
    Training,
)
from mlora_worker.storage.errors import AccessRefused, StorageError, StoreUnreachable


def run() -> TaskRun:
    return TaskRun(
        TaskPlan(
            uid="a", namespace="n", name="a", base_model="m", lora=LoRAConfig(), dataset=Dataset(inline="{}"),
            training=Training(), output_uri="s3://b/p", storage=StorageAccess(region="old"),
        )
    )  # fmt: skip


def test_pauses_grow_to_half_a_minute_and_never_end() -> None:
    assert list(islice(pauses(), 8)) == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_store_that_refuses_for_long_is_tried_until_it_takes_what_it_gets_with_the_newest_keys() -> None:
    task, rested, used, said = run(), list[float](), list[str](), list[str]()

    def work() -> str:
        used.append(task.plan.storage.region)
        if len(used) < 20:
            raise AccessRefused("unknown key")
        return "stored"

    def pause(seconds: float) -> None:
        rested.append(seconds)
        assert task.blocked is not None
        assert task.blocked.reason is FailureReason.ACCESS_DENIED
        said.append(task.blocked.message)
        task.plan = task.plan.model_copy(update={"storage": StorageAccess(region=f"new-{len(rested)}")})

    changes: list[None] = []
    found = until_stored(
        work,
        task,
        "uploading the adapter",
        changed=threading.Condition(),
        on_change=lambda: changes.append(None),
        pause=pause,
        turn=threading.BoundedSemaphore(1),
    )
    assert found == "stored"
    assert len(rested) == 19
    assert max(rested) == 30.0
    assert used == ["old", *(f"new-{number}" for number in range(1, 20))]
    assert set(said) == {"uploading the adapter failed and is tried again: unknown key"}
    assert task.blocked is None
    assert len(changes) == 20, "each refusal is reported, and so is the end of the trouble"


def attempt(task: TaskRun, error: Exception) -> None:
    def work() -> None:
        raise error

    def pause(_: float) -> None:
        task.withdrawn = True

    until_stored(
        work,
        task,
        "writing a checkpoint",
        changed=threading.Condition(),
        on_change=lambda: None,
        pause=pause,
        turn=threading.BoundedSemaphore(1),
    )


def test_nobody_tries_for_a_task_that_was_deleted() -> None:
    with pytest.raises(Withdrawn):
        attempt(run(), StoreUnreachable("away"))


def test_what_is_not_the_stores_fault_is_final() -> None:
    with pytest.raises(KeyError):
        attempt(run(), KeyError("x"))


def test_a_full_volume_keeps_its_words() -> None:
    task = run()
    with pytest.raises(Withdrawn):
        attempt(
            task, StorageError(FailureReason.INSUFFICIENT_SPACE, "cannot write: no space left on that volume")
        )
    assert task.blocked is not None
    assert "no space left on that volume" in task.blocked.message
    assert task.blocked.reason is FailureReason.INSUFFICIENT_SPACE


@pytest.mark.parametrize(
    ("phase", "told"),
    [
        (TaskPhase.PREPARING, FailureReason.DATASET_NOT_FOUND),
        (TaskPhase.TRAINING, FailureReason.UPLOAD_FAILED),
        (TaskPhase.SAVING, FailureReason.UPLOAD_FAILED),
    ],
)
def test_what_is_missing_once_the_rows_are_here_is_the_place_of_the_output(
    phase: TaskPhase, told: FailureReason
) -> None:
    task = run()
    task.phase = phase
    with pytest.raises(Withdrawn):
        attempt(task, StorageError(FailureReason.DATASET_NOT_FOUND, "the bucket is gone"))
    assert task.blocked is not None
    assert task.blocked.reason is told


def test_a_pause_holds_nobody_elses_turn() -> None:
    turn = threading.BoundedSemaphore(1)
    task = run()

    def pause(_: float) -> None:
        assert turn.acquire(blocking=False)
        turn.release()
        task.withdrawn = True

    def work() -> None:
        assert not turn.acquire(blocking=False), "the try itself has it"
        raise StoreUnreachable("away")

    with pytest.raises(Withdrawn):
        until_stored(
            work,
            task,
            "fetching a checkpoint",
            changed=threading.Condition(),
            on_change=lambda: None,
            pause=pause,
            turn=turn,
        )
