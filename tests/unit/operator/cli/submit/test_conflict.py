"""What becomes of a task whose name is taken: a table."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.cli.output import CommandError
from mlora_operator.cli.submit.conflict import Step, decide

SPEC: dict[str, Any] = {"baseModel": "m", "dataset": {"uri": "s3://d/a"}, "output": {"uri": "s3://o/a"}}
OTHER = SPEC | {"lora": {"rank": 4}}


def task(spec: dict[str, Any], ended: str | None = None, **meta: str) -> dict[str, Any]:
    held = [{"type": ended, "status": "True", "reason": "R", "message": "m"}] if ended else []
    metadata = {"name": "a", "namespace": "n", "uid": "u", **meta}
    return {"kind": "LoRATask", "metadata": metadata, "spec": spec, "status": {"conditions": held}}


@pytest.mark.parametrize(
    ("there", "replace", "step"),
    [
        (None, False, Step.CREATE),
        (None, True, Step.CREATE),
        (task(SPEC), False, Step.APPLY),
        (task(SPEC), True, Step.APPLY),
        (task(SPEC | {"priority": 5}), False, Step.APPLY),
        (task(SPEC, "Succeeded"), False, Step.KEEP),
        (task(SPEC, "Succeeded"), True, Step.KEEP),
        (task(SPEC | {"priority": 5}, "Succeeded"), False, Step.KEEP),
        (task(SPEC, "Failed"), False, Step.KEEP),
        (task(SPEC, "Failed"), True, Step.REPLACE),
        (task(OTHER), True, Step.REPLACE),
        (task(OTHER, "Succeeded"), True, Step.REPLACE),
        (task(OTHER, deletionTimestamp="now"), False, Step.CREATE),
    ],
)
def test_the_step(there: dict[str, Any] | None, replace: bool, step: Step) -> None:
    assert decide(task(SPEC), there, replace=replace) is step


@pytest.mark.parametrize(
    ("in_file", "there", "seen", "step"),
    [
        ("2", "1", "1", Step.APPLY),
        ("2", None, None, Step.APPLY),
        (None, "2", "1", Step.APPLY),  # by kubectl annotate
        ("1", "1", "1", Step.KEEP),
        (None, "1", "1", Step.KEEP),
    ],
)
def test_a_failed_task_goes_on_with_a_new_value_of_its_annotation(
    in_file: str | None, there: str | None, seen: str | None, step: Step
) -> None:
    def annotated(held: dict[str, Any], value: str | None) -> dict[str, Any]:
        annotations = {} if value is None else {"annotations": {"mlora.dev/retry": value}}
        return held | {"metadata": held["metadata"] | annotations}

    failed = annotated(task(SPEC, "Failed"), there)
    failed["status"]["retry"] = seen
    assert decide(annotated(task(SPEC), in_file), failed, replace=False) is step


@pytest.mark.parametrize("ended", [None, "Succeeded", "Failed"])
def test_a_name_that_is_taken_by_another_spec_is_refused_with_what_to_do(ended: str | None) -> None:
    with pytest.raises(CommandError) as refusal:
        decide(task(SPEC), task(OTHER, ended), replace=False)
    assert refusal.value.exit_code == 7
    message = str(refusal.value)
    assert (
        "loratask/a exists with another spec: spec.lora.rank is 4 in the cluster and 16 in the file"
        in message
    )
    assert "--replace" in message
    assert "--name-suffix" in message


def test_many_differences_are_counted() -> None:
    training = {
        "batchSize": 1,
        "epochs": 3,
        "learningRate": 0.5,
        "seed": 1,
        "weightDecay": 0.5,
        "warmupSteps": 3,
    }
    with pytest.raises(CommandError, match="and 2 fields more"):
        decide(task(SPEC), task(OTHER | {"training": training}), replace=False)
