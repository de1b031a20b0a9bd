"""One report is of all tasks: what cannot be told of one of them is its own failure."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mlora_worker.coordinator.task.progress import TrainingProgress
from mlora_worker.coordinator.task.report import report_of
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.data.errors import DataError
from mlora_worker.protocol import (
    Dataset,
    FailureReason,
    LoRAConfig,
    Plan,
    Report,
    TaskPhase,
    TaskPlan,
    Training,
)
from mlora_worker.storage.errors import AccessRefused
from tests.fixtures.inline import Waiting, pool
from tests.unit.worker.coordinator.test_service import Failing, coordinator, task

HUGE = 10**400


@pytest.mark.parametrize(
    "state",
    [
        {"tokens": HUGE, "seconds": 1.0},
        {"step": -1},
    ],
    ids=["more tokens than any number", "a step before the first"],
)
def test_what_cannot_be_told_of_a_task_is_its_own_failure_and_the_others_are_reported(
    state: dict[str, Any],
) -> None:
    one = coordinator(Failing(AccessRefused("no")), [], preparing=pool(Waiting()))
    assert one.set_plan(Plan(generation=1, tasks=(task("a"), task("b"), task("c"))))
    one._tasks["b"].progress = TrainingProgress(**state)
    for _ in range(2):  # and again, for nothing in it has become better
        read = Report.model_validate_json(one.wait_report(-1, 0).to_json())
        assert [found.phase for found in read.tasks] == [
            TaskPhase.PREPARING,
            TaskPhase.FAILED,
            TaskPhase.PREPARING,
        ]
        failure = read.tasks[1].failure
        assert failure is not None
        assert failure.reason is FailureReason.INTERNAL_ERROR
        assert "cannot be reported" in failure.message
    assert one._tasks["b"].phase is TaskPhase.FAILED, "it leaves the stream"


@pytest.mark.parametrize("seconds", [5e-324, 0.0])
def test_a_rate_that_is_no_number_is_not_told(seconds: float) -> None:
    run = TaskRun(task("a"))
    run.progress = TrainingProgress(tokens=10**9, seconds=seconds)
    assert report_of(run).tokens_per_second is None
    run.progress = replace(run.progress, seconds=2.0)
    assert report_of(run).tokens_per_second == 5e8


def test_a_failure_in_a_report_is_news_that_wakes_whoever_waits_for_it() -> None:
    one = coordinator(Failing(AccessRefused("no")), [], preparing=pool(Waiting()))
    assert one.set_plan(Plan(generation=1, tasks=(task("a"),)))
    before = one.wait_report(-1, 0).sequence
    one._tasks["a"].progress = TrainingProgress(step=-1)
    assert one.wait_report(-1, 0).sequence > before
    assert one.wait_report(-1, 0).sequence == one.wait_report(-1, 0).sequence, "once"


def test_words_of_a_store_that_are_no_text_are_told_all_the_same() -> None:
    plan = TaskPlan(
        uid="a", namespace="n", name="a", base_model="m", lora=LoRAConfig(), dataset=Dataset(inline="{}"),
        training=Training(), output_uri="s3://b/p",
    )  # fmt: skip
    run = TaskRun(plan)
    run.fail(FailureReason.INVALID_SPEC, "bucket \ud800 " + "x" * 10**6)
    assert run.failure is not None
    assert len(json.loads(report_of(run).to_json())["failure"]["message"]) == 2048
    run.block(FailureReason.INVALID_SPEC, "bucket \ud800")
    assert run.blocked is not None
    assert run.blocked.message == "bucket \\ud800"


def test_a_task_that_fails_with_such_words_fails() -> None:
    error = DataError(FailureReason.INVALID_ROW, "line 3 has \udc80")
    one = coordinator(Failing(error), [])
    assert one.set_plan(Plan(generation=1, tasks=(task("a"),)))
    [report] = one.wait_report(-1, 0).tasks
    assert report.phase is TaskPhase.FAILED
