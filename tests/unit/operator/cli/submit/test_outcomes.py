"""How a task ends, and the number that says so."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.cli.submit.outcomes import ResultTracker, TaskResult, exit_code


def task(ended: str | None = None, state: str = "Training", uid: str = "u") -> dict[str, Any]:
    held = [{"type": ended, "status": "True"}] if ended else []
    meta = {"name": "a", "namespace": "n", "uid": uid}
    return {"metadata": meta, "spec": {}, "status": {"state": state, "conditions": held}}


@pytest.mark.parametrize(
    ("there", "outcome"),
    [
        (task(), None),
        (task("Succeeded"), TaskResult.SUCCEEDED),
        (task("Failed"), TaskResult.FAILED),
        (task("Succeeded", uid="of a later one"), TaskResult.GONE),
        (None, TaskResult.GONE),
    ],
)
def test_the_outcome(there: dict[str, Any] | None, outcome: TaskResult | None) -> None:
    assert ResultTracker("u", 60).of(there, 0) is outcome


def test_a_rejected_task_gets_time_until_the_cause_is_gone() -> None:
    verdict = ResultTracker("u", 60)
    assert verdict.of(task(state="Rejected"), 0) is None
    assert verdict.of(task(state="Rejected"), 59) is None
    assert verdict.of(task(state="Queued"), 60) is None
    assert verdict.of(task(state="Rejected"), 70) is None
    assert verdict.of(task(state="Rejected"), 130) is TaskResult.REFUSED


def test_a_failed_task_that_is_to_be_tried_again_has_not_ended() -> None:
    failed = task("Failed")
    failed["metadata"]["annotations"] = {"mlora.dev/retry": "2"}
    failed["status"]["retry"] = "1"
    assert ResultTracker("u", 60).of(failed, 0) is None
    failed["status"]["retry"] = "2"  # it failed once more
    assert ResultTracker("u", 60).of(failed, 1) is TaskResult.FAILED


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([TaskResult.SUCCEEDED, TaskResult.SUCCEEDED], 0),
        ([TaskResult.SUCCEEDED, TaskResult.GONE], 5),
        ([TaskResult.GONE, TaskResult.REFUSED], 7),
        ([TaskResult.REFUSED, TaskResult.FAILED, TaskResult.GONE], 1),
    ],
)
def test_the_worst_outcome_decides(outcomes: list[TaskResult], code: int) -> None:
    assert exit_code(outcomes) == code
