"""A task's state is a few objects, so a reset leaves nothing of the former attempt behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from mlora_worker.coordinator.task.checkpoint_state import CheckpointState
from mlora_worker.coordinator.task.divergence import MismatchedRows, begun
from mlora_worker.coordinator.task.evaluation import Best, EvaluationInFlight
from mlora_worker.coordinator.task.history import History
from mlora_worker.coordinator.task.in_flight import InFlight
from mlora_worker.coordinator.task.outcome import PendingCheckpoint
from mlora_worker.coordinator.task.prepared import PreparedTask, Restoration
from mlora_worker.coordinator.task.progress import TrainingProgress, progress_of
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.data.prepare import TokenRow
from mlora_worker.data.training_rows.step_order import StepPlan
from mlora_worker.protocol import (
    DataCounts,
    Dataset,
    EvaluationRecord,
    FailureReason,
    LoRAConfig,
    StepRecord,
    TaskPhase,
    TaskPlan,
    Training,
)
from mlora_worker.storage.artifacts.task_state import EvaluationProgress, TaskState
from mlora_worker.stream.items import Update
from mlora_worker.stream.planner import TaskLoad

RECORD = StepRecord(step=3, loss=1.0, learning_rate=1e-4, grad_norm=1.0, tokens=8)
EVALUATED = EvaluationRecord(step=2, loss=1.0, token_accuracy=0.5, tokens=8)
PARTS = {0: {"q": torch.ones(1)}}


def training_task() -> TaskRun:
    """After three steps, of which two are in the store, with something in every field that training fills."""
    training = Training(batch_size=1, max_steps=9)
    plan = TaskPlan(
        uid="a", namespace="n", name="a", admitted=True, base_model="m", lora=LoRAConfig(), dataset=Dataset(inline=""),
        training=training, output_uri="s3://b/p",
    )  # fmt: skip
    row = TokenRow(np.zeros(8, np.int32), np.zeros(8, np.int32))
    prepared = PreparedTask((row,), DataCounts(rows=1, used=1), StepPlan(1, training), (), TaskLoad(8, 1))
    run = TaskRun(plan, TaskPhase.TRAINING, prepared, in_stream=True)
    run.progress = TrainingProgress(3, 3, 24, 9.0, RECORD, EvaluationProgress(last=EVALUATED, best=EVALUATED))
    run.history = History(b'{"step": 1, "loss": 1.0}\n')
    run.best = Best(1, EVALUATED, dict(PARTS))
    run.flight = InFlight(1.0, 2.0, None, Update(step=3, learning_rate=1e-4, clip=1.0), True)
    run.flight.assessment, run.flight.keep_is_due = EvaluationInFlight(3, [], 8, 8.0), True
    run.flight.parts = dict(PARTS)
    run.begin_step()
    run.flight.divergence = begun(MismatchedRows([row], 8), [(0,)])
    state = TaskState(run.saved_progress(), {"parameters.q": torch.ones(1)})
    restoration = Restoration(state.progress, {}, {})
    run.checkpoint = CheckpointState(PendingCheckpoint(4, state.progress), state, restoration, 3, 2, 1)
    return run


def held_by(run: TaskRun) -> dict[str, object]:
    return {name: getattr(run, name) for name in ("progress", "history", "best", "flight", "checkpoint")}


def test_the_task_of_these_tests_has_something_in_every_field_that_training_fills() -> None:
    run = training_task()
    for part in (run.progress, run.flight, run.checkpoint):
        new = type(part)()
        same = [field.name for field in fields(part) if getattr(part, field.name) == getattr(new, field.name)]
        assert same == (["refers", "broken"] if part is run.flight else [])


def without_any_checkpoint(run: TaskRun) -> None:
    run.checkpoint = replace(run.checkpoint, state=None, stored_step=0)
    run.roll_back()


def before_its_first_step(run: TaskRun) -> None:
    run.progress = replace(run.progress, step=0)
    run.step_out()


@pytest.mark.parametrize("reset", [TaskRun.restart, without_any_checkpoint, before_its_first_step])
def test_a_task_that_starts_from_its_beginning_is_as_one_that_never_trained(
    reset: Callable[[TaskRun], None],
) -> None:
    run = training_task()
    reset(run)
    found, new = held_by(run), held_by(replace(run, **held_by(TaskRun(run.plan))))
    assert found.pop("history").lines() == new.pop("history").lines() == b""  # type: ignore[attr-defined]
    assert (run.phase, found) == (TaskPhase.PREPARED, new)


def test_a_task_that_left_behind_a_checkpoint_keeps_its_progress_and_nothing_in_the_stream() -> None:
    run = training_task()
    run.in_stream, run.checkpoint = False, run.checkpoint.stored(3)
    progress, checkpoint = run.progress, run.checkpoint
    run.step_out()
    assert (run.phase, run.flight) == (TaskPhase.PREEMPTED, InFlight())
    assert run.progress is progress
    assert run.checkpoint is checkpoint


def test_a_task_that_is_rolled_back_resumes_from_its_newest_checkpoint_in_memory_or_store() -> None:
    run = training_task()
    run.progress = replace(run.progress, step=5)
    run.roll_back()
    assert (run.progress.step, run.checkpoint.taken_step, run.checkpoint.snapshot) == (3, 3, None)
    assert run.flight == InFlight(broken=True), "its tensors on the stages are void"
    run.checkpoint = run.checkpoint.released()
    run.roll_back()
    assert run.progress.step == 2


def test_a_failed_task_holds_no_tensors_and_the_rest_of_its_step_may_come_back() -> None:
    run = training_task()
    step = run.flight.step
    run.block(FailureReason.ACCESS_DENIED, "no")
    run.fail(FailureReason.INTERNAL_ERROR, "broken")
    assert (run.flight, run.best, run.blocked) == (InFlight(step=step), None, None)
    kept = run.checkpoint
    assert (kept.snapshot, kept.state, kept.restoration) == (None, None, None)
    assert (kept.stored_step, kept.resumed_step) == (2, 1), "which its report still says"
    run.finish_step(10.0)
    assert (run.phase, run.progress.step) == (TaskPhase.FAILED, 3)


def test_a_resumed_task_counts_its_time_from_where_the_checkpoint_left_it() -> None:
    run = training_task()
    saved = run.saved_progress().model_copy(update={"evaluation": run.progress.evaluated})
    run.flight = InFlight(started=100.0)
    run.resume(Restoration(saved, {}, {}, best=PARTS[0], history=History()))
    assert run.progress == progress_of(saved)
    assert run.best is not None
    assert run.checkpoint.restoration is None
    run.begin_step()
    run.finish_step(101.5)
    assert (run.progress.step, run.progress.seconds) == (4, 10.5)


def test_a_state_from_the_store_corrects_the_step_that_was_known_and_one_from_memory_does_not() -> None:
    run = training_task()
    assert run.checkpoint.restoration is not None
    made = run.checkpoint.restoration
    assert run.checkpoint.fetched(made).stored_step == 2
    assert run.checkpoint.released().fetched(made).stored_step == 3
